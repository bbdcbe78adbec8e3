"""`thinwire report`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..lab.results import write
from .console import console, errors, failure


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A journal written by `wire.log_to` (file or folder), or a result file of `bench step`; several are compared.",
            metavar="RUN...",
        ),
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    trace: Annotated[
        Path | None,
        typer.Option(help="Write the traced steps as Chrome trace JSON instead, for ui.perfetto.dev."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers of all runs to this file.")
    ] = None,
) -> None:
    """Write a self-contained HTML page about a run, or a page that compares several.

    Examples:

    thinwire report runs/micro --out micro.html

    thinwire report runs/plain.jsonl runs/micro.jsonl steps.json

    thinwire report runs/micro --trace micro-trace.json
    """
    from ..report import page
    from ..report.runs import Run, load, summarise
    from ..report.trace import chrome

    with errors():
        given = [load(run) for run in runs]
        found = [one for one in given if isinstance(one, Run)]
        if trace is not None:
            if len(found) != 1 or len(given) != 1:
                raise failure("a trace shows one run: thinwire report RUN --trace FILE")
            steps = sum(len(journal.traces) for journal in found[0].journals)
            if not steps:
                raise failure(
                    f"no step of {runs[0]} was traced: call wire.trace(20) in the job, after wire.log_to(...)"
                )
            trace.write_text(json.dumps(chrome(found[0])))
            console.print(escape(f"{trace}: {steps} traced steps; open it at https://ui.perfetto.dev"), soft_wrap=True)
        else:
            page.write(out, given)
            console.print(escape(f"{out}: open it in a browser"), soft_wrap=True)
        if json_file is not None:
            write(json_file, "report", [summarise(run) for run in found], {})
