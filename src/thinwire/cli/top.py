"""`thinwire top`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from ..lab.results import write
from .console import errors, failure, output


def top(
    run: Annotated[Path, typer.Argument(help="A journal written by `wire.log_to`: file or folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
    groups: Annotated[
        int, typer.Option(help="Number of groups to show, those with the most wire time first.", min=0)
    ] = 12,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file, once.")] = None,
) -> None:
    """Watch a running job: step time by phase, traffic, latest events. Ctrl-C ends it.

    Prints one frame if the output is not a terminal.

    Example: thinwire top runs/micro
    """
    from ..report.runs import summarise
    from ..report.terminal import LAST, Watched, frame

    with errors():
        watched = Watched(run)
        watched.update()
        if not watched.journal.starts:
            raise failure(f"{watched.path}: nothing was written yet")
        write(json_file, "top", [summarise(watched.run, LAST)], {})
        if once or not output.is_terminal:
            output.print(frame(watched.run, groups))
            return
        with Live(frame(watched.run, groups), console=output, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                watched.update()
                live.update(frame(watched.run, groups), refresh=True)
