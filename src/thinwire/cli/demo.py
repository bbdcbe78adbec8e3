"""`thinwire demo`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..lab.cluster import Cluster
from ..lab.demo_setup import LEARNING_RATE, NODES, RATE, Setup
from ..lab.netns import format_rate
from ..lab.results import write
from .console import JsonFile, can_be_written, console, errors, output

if TYPE_CHECKING:
    from ..lab.calibrate import Calibration
    from ..lab.demo import Outcome
    from .verdict import Link, Pair


def demo(
    codec: Annotated[
        str, typer.Option(help="How gradients are compressed: auto, or a codec such as 'micro(density=0.01)'.")
    ] = "auto",
    rate: Annotated[
        str, typer.Option(help="Rate of the links between the machines: 100mbit, 1gbit, ...; none: not shaped.")
    ] = RATE,
    nodes: Annotated[int, typer.Option(help="Number of emulated machines.", min=2, max=64)] = NODES,
    minutes: Annotated[
        float | None, typer.Option(help="About how long both runs may take together; default: 2.", min=0.5, max=120)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run, instead of --minutes.", min=10)
    ] = None,
    lr: Annotated[
        float, typer.Option(help="Peak of the learning rate, the same in both runs.", min=1e-4, max=100.0)
    ] = LEARNING_RATE,
    data: Annotated[Path | None, typer.Option(help="Text file to train on; default: Python's help texts.")] = None,
    report: Annotated[
        Path, typer.Option(callback=can_be_written, help="Write an HTML report of both runs to this file.")
    ] = Path("report.html"),
    json_file: JsonFile = None,
) -> None:
    """Train a small GPT on emulated machines joined by slow links, with plain DDP and with thinwire.

    Example: thinwire demo --rate 1gbit --minutes 1
    """
    with errors():
        setup = Setup(codec, rate, nodes, minutes, steps, lr, data)
        setup.check()
        with Cluster(nodes, rate=rate) as cluster, tempfile.TemporaryDirectory() as folder:
            from . import verdict

            link = verdict.Link(cluster.rate, cluster.shaped, cluster.why)
            if link.why_not:
                console.print(f"[yellow]{escape(verdict.not_shown(link))}[/yellow]")
            else:
                console.print(escape(_links(nodes, cluster.calibrate())))
            plain, ours = _train(cluster, setup, Path(folder))
            pair = _report(report, plain, ours, link, setup, Path(folder))
            _show(pair)
            console.print(escape(f"{report}: both runs as curves; open it in a browser"), soft_wrap=True)
            write(json_file, setup.command, verdict.rows(pair), {"mode": cluster.mode, **verdict.summary(pair)})


def _links(nodes: int, found: Calibration) -> str:
    """What joins the nodes, as measured."""
    measured = f"TCP reaches {format_rate(found.measured)}" if found.measured else "not measured"
    warning = "" if found.good else "; not within 15 % of the rate at all sizes: is this machine busy?"
    return f"{nodes} nodes, links of {format_rate(found.rate)}, {measured}{warning}"


def _train(cluster: Cluster, setup: Setup, folder: Path) -> tuple[Outcome, Outcome]:
    """Plain DDP, then as many steps with thinwire, with the progress of both on two lines."""
    from ..lab.demo import train

    with _two_lines() as (first, second):
        plain = train(cluster, "fp32", setup, first)
        ours = train(cluster, setup.codec, setup, second, steps=len(plain.ends), log=folder / "thinwire")
    return plain, ours


class Line:
    """The progress of one run."""

    def __init__(self, bars: Progress, name: str) -> None:
        self._bars = bars
        self._task = bars.add_task(name, total=None, start=False, said="")

    def __call__(self, outcome: Outcome) -> None:
        done = len(outcome.ends)
        if not done:
            self._bars.start_task(self._task)
            self._bars.update(self._task, total=outcome.steps)
            return
        sent = outcome.bytes_sent
        said = f"loss {outcome.last_loss:.2f}" + (f"  {sent / 1e6:.0f} MB sent" if sent is not None else "")
        self._bars.update(self._task, completed=done, said=said)


@contextlib.contextmanager
def _two_lines() -> Iterator[tuple[Line, Line]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        yield Line(bars, "plain DDP"), Line(bars, "thinwire ")


def _report(path: Path, plain: Outcome, ours: Outcome, link: Link, setup: Setup, folder: Path) -> Pair:
    """One page with both runs; returns what its headline compares."""
    import msgspec

    from ..report import page
    from ..report.headline import compare, course
    from ..report.runs import Run, load
    from .verdict import Pair

    file = folder / "plain DDP.jsonl"
    plain.write_journal(file, setup.nodes)
    runs = [load(file), load(folder / "thinwire")]
    courses = []
    for run, outcome in zip(runs, (plain, ours), strict=True):
        assert isinstance(run, Run)
        # The journal of a wire begins when it is attached: what that took counts.
        run.first.starts[0] = msgspec.structs.replace(run.first.starts[0], time=outcome.began)
        found = course(run)
        courses.append(replace(found, bytes=outcome.bytes_sent) if outcome.bytes_sent else found)
    page.write(path, runs, [compare(*courses)])
    return Pair(plain, ours, courses[0], courses[1], link, setup)


def _show(pair: Pair) -> None:
    """Totals, a small table, the verdict, and what to do next; 80 columns are enough."""
    from .verdict import NEXT, milliseconds, seconds, totals, verdict

    output.print(escape(totals(pair)))
    rate = pair.link.rate if pair.link.shaped else "links not shaped"
    title = f"{pair.setup.nodes} nodes, {rate}, {len(pair.plain.ends)} steps, {pair.setup.text_name}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("", overflow="fold", min_width=9)
    for column in ("total", "per step", "sent by a node", "loss at the end"):
        table.add_column(column, justify="right")
    for outcome, name in ((pair.plain, "plain DDP"), (pair.ours, f"thinwire, {pair.ours.method}")):
        table.add_row(
            escape(name),
            seconds(outcome.total_seconds),
            milliseconds(outcome.step_seconds),
            f"{outcome.bytes_sent / 1e6:.0f} MB" if outcome.bytes_sent is not None else "not known",
            f"{outcome.last_loss:.3f}",
        )
    output.print(table)
    output.print(escape(verdict(pair)))
    for line in NEXT:
        output.print(escape(line))
