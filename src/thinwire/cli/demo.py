"""`thinwire demo`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..lab.cluster import Cluster
from ..lab.results import write
from .console import JsonFile, console, errors, failure, output, progress

if TYPE_CHECKING:
    from ..lab.demo import Outcome


def demo(
    codec: Annotated[
        str, typer.Option(help="How gradients are compressed: auto, or a codec such as 'micro(density=0.01)'.")
    ] = "auto",
    rate: Annotated[str, typer.Option(help="Rate of the link between the two machines.")] = "100mbit",
    steps: Annotated[int, typer.Option(help="Training steps of each run.", min=10)] = 80,
    data: Annotated[Path | None, typer.Option(help="Text file to train on; default: Python's help texts.")] = None,
    report: Annotated[Path, typer.Option(help="Write an HTML report of both runs to this file.")] = Path(
        "report.html"
    ),
    json_file: JsonFile = None,
) -> None:
    """Train a small GPT on two emulated machines joined by a slow link, with plain DDP and with thinwire.

    Example: thinwire demo --rate 1gbit --codec 'topk(density=0.01)'
    """
    with errors():
        if codec != "auto":
            from ..codecs import parse

            parse(codec)
        if data is not None and not data.is_file():
            raise failure(f"there is no file {str(data)!r}")
        with Cluster(2, rate=rate) as cluster:
            if cluster.why:
                console.print(f"[yellow]{escape(cluster.why)}[/yellow]", soft_wrap=True)
            else:
                console.print(escape(f"two nodes, {cluster.rate}; {cluster.calibrate()}"), soft_wrap=True)
            with tempfile.TemporaryDirectory() as folder:
                outcomes = _run_all(cluster, ["fp32", codec], steps, data, Path(folder))
                _show(outcomes, cluster)
                _report(report, outcomes, Path(folder))
            summary = {"mode": cluster.mode, "shaped": cluster.shaped, "why_not_shaped": cluster.why or None}
            write(json_file, "demo", _rows(outcomes, cluster, steps), summary)


def _run_all(cluster: Cluster, methods: list[str], steps: int, data: Path | None, folder: Path) -> list[Outcome]:
    from ..lab.demo import train

    outcomes = []
    for method in methods:
        with progress(_name(method), steps) as watcher:
            outcomes.append(train(cluster, method, steps, data, lambda _: watcher.advance(1), folder / "thinwire"))
    return outcomes


def _report(path: Path, outcomes: list[Outcome], folder: Path) -> None:
    """One page with both runs."""
    from ..report import page
    from ..report.runs import load

    plain = folder / "plain DDP.jsonl"
    outcomes[0].write_journal(plain, 2)
    page.write(path, [load(plain), load(folder / "thinwire")])
    console.print(escape(f"{path}: report of both runs; open it in a browser"), soft_wrap=True)


def _name(method: str) -> str:
    return "plain DDP, fp32" if method == "fp32" else f"thinwire, {method}"


def _show(outcomes: list[Outcome], cluster: Cluster) -> None:
    rate = cluster.rate if cluster.shaped else "loopback, not shaped"
    table = Table(
        title=f"2 workers, {rate}: small GPT (1.9 M parameters), text of Python's help", title_justify="left"
    )
    table.add_column("", overflow="fold", min_width=20)
    for column in ("step", "all steps", "sent by a node per step", "loss at the end", "faster"):
        table.add_column(column, justify="right")
    dense = outcomes[0]
    for outcome in outcomes:
        size = outcome.bytes_per_step or outcome.stats.get("link_bytes_per_step")
        table.add_row(
            _name(outcome.method),
            f"{1000 * outcome.step_seconds:.0f} ms",
            f"{sum(outcome.seconds):.0f} s",
            f"{size / 1e6:.2f} MB" if size else "-",
            f"{outcome.last_loss:.3f}",
            f"{dense.step_seconds / outcome.step_seconds:.1f} x",
        )
    output.print(table)
    output.print("step: median of the second half; all steps: including the measurements of `auto`")
    for outcome in outcomes:
        if outcome.stats.get("explained"):
            output.print(escape(outcome.stats["explained"]), soft_wrap=True)


def _rows(outcomes: list[Outcome], cluster: Cluster, steps: int) -> list[dict[str, Any]]:
    return [
        {
            "workload": "gpt-small",
            "nodes": 2,
            "ranks_per_node": 1,
            "rate": cluster.rate,
            "method": outcome.method,
            "seconds": outcome.step_seconds,
            "ratio_to_fp32": outcome.step_seconds / outcomes[0].step_seconds,
            "bytes_per_rank": outcome.bytes_per_step,
            "stats_bytes_per_rank": outcome.stats.get("bytes_per_step"),
            "loss": outcome.last_loss,
            "steps": steps,
        }
        for outcome in outcomes
    ]
