"""`thinwire lab`: an emulated cluster on this machine."""

import contextlib
import os
import shlex
import signal
import threading
import time
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..lab.calibrate import Calibration
from ..lab.cluster import Cluster
from ..lab.launch import Result
from ..lab.leftovers import Record, records, remove_dead
from ..lab.netns import format_rate
from ..lab.results import write
from .console import JsonFile, console, errors, failure

app = typer.Typer(
    name="lab",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="An emulated cluster on this machine: one network namespace per node, links of a chosen rate. No root needed.",
)

Nodes = Annotated[int, typer.Option(help="Emulated machines.", min=1)]
Rate = Annotated[str, typer.Option(help="Rate of every link, both directions: 500kbit, 100mbit, 2.5gbit, or none.")]


@app.command()
def up(nodes: Nodes = 4, rate: Rate = "1gbit", json_file: JsonFile = None) -> None:
    """Create a cluster and keep it until Ctrl-C or [bold]thinwire lab down[/bold].

    Example: thinwire lab up --nodes 4 --rate 1gbit
    """
    try:
        with errors(), Cluster(nodes, rate=rate, about={"kept": True}) as cluster:
            if cluster.mode == "loopback":
                raise failure(f"there is nothing to keep up: {cluster.why}; `thinwire doctor` says what would help")
            calibration = cluster.calibrate()
            _announce(cluster, calibration)
            places = [
                {"node": node, "address": cluster.address(node), "enter": shlex.join(cluster.enter(node))}
                for node in range(nodes)
            ]
            shape = {"rate": cluster.rate, "mode": cluster.mode, "shaped": cluster.shaped}
            write(json_file, "lab up", places, {"cluster": cluster.id, **shape, "calibration": calibration.as_dict()})
            for node in range(nodes):
                words = shlex.join([*cluster.enter(node), "bash"])
                console.print(f"node {node}, {cluster.address(node)}:  {escape(words)}", soft_wrap=True)
            console.print("The cluster stays up until Ctrl-C here, or `thinwire lab down` elsewhere.")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
    except SystemExit as leaving:
        if leaving.code != 128 + signal.SIGTERM:  # sent by `lab down`
            raise
    console.print("The cluster is gone.")


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(
            help="The command of every rank, started with the environment of torchrun.", metavar="COMMAND..."
        ),
    ],
    nodes: Nodes = 4,
    rate: Rate = "1gbit",
    ranks_per_node: Annotated[int, typer.Option(help="Processes per node.", min=1)] = 1,
    pin: Annotated[bool, typer.Option(help="One core per rank, or per node, if there are enough.")] = True,
    calibrate: Annotated[bool, typer.Option(help="Measure the links first.")] = True,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the job is killed, with exit code 124.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Run a command on every rank of a new cluster, with RANK, WORLD_SIZE, MASTER_ADDR etc. set.

    Output lines are prefixed with the rank. The first rank that fails ends the job; its exit code is returned.

    Examples:

    thinwire lab run --nodes 2 --rate 100mbit -- python train.py --epochs 1

    thinwire lab run --nodes 2 --ranks-per-node 2 --rate none --json result.json -- python train.py
    """
    with errors(), Cluster(nodes, ranks_per_node, rate) as cluster:
        calibration = cluster.calibrate() if calibrate else None
        _announce(cluster, calibration)
        outcome = cluster.run(command, pin=pin, timeout=timeout)
        _conclude(cluster, outcome)
        summary = {
            "job": command,
            "nodes": nodes,
            "ranks_per_node": ranks_per_node,
            "rate": cluster.rate,
            "measured_rate": format_rate(calibration.measured) if calibration and calibration.measured else None,
            "mode": cluster.mode,
            "shaped": cluster.shaped,
            "why_not_shaped": cluster.why or None,
            "pinned": outcome.pinned,
            "exit_code": outcome.code,
            "failed_rank": outcome.failed_rank,
            "timed_out": outcome.timed_out,
            "seconds": outcome.seconds,
            "calibration": calibration.as_dict() if calibration else None,
        }
        write(json_file, "lab run", _rows(cluster, outcome), summary)
    raise typer.Exit(outcome.code)


@app.command()
def down(
    cluster: Annotated[
        str | None, typer.Argument(help="Only the cluster with this name, printed by `lab up`.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove leftovers of killed programs; running clusters are not touched.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Stop clusters kept by [bold]thinwire lab up[/bold], or remove those whose program has died.

    Examples:

    thinwire lab down

    thinwire lab down --all
    """
    with errors():
        if everything:
            removed = remove_dead()
        else:
            kept = [record for record in records() if record.alive and record.about.get("kept")]
            removed = [record for record in kept if cluster in (None, record.identity)]
            if cluster is not None and not removed:
                raise failure(f"no cluster {cluster!r} is kept by `thinwire lab up`; `thinwire lab down` ends all")
            for record in removed:
                _ask_to_end(record)
        rows = [{"cluster": record.identity, "process": record.pid} for record in removed]
        write(json_file, "lab down", rows, {"removed": len(rows)})
    for record in removed:
        console.print(f"removed {record.identity}, of process {record.pid}")
    if not removed:
        console.print("There is nothing to remove.")


def _ask_to_end(record: Record) -> None:
    os.kill(record.pid, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while record.alive and record.path.exists():
        if time.monotonic() > deadline:
            raise failure(f"process {record.pid} was asked to stop its cluster {record.identity} and has not")
        time.sleep(0.05)


def _announce(cluster: Cluster, calibration: Calibration | None) -> None:
    console.print(f"cluster {cluster.id}: {cluster.nodes} nodes, {cluster.mode}, rate {cluster.rate}")
    if cluster.why:
        console.print(f"[yellow]not shaped:[/yellow] {escape(cluster.why)}", soft_wrap=True)
    if calibration is not None:
        console.print(escape(str(calibration)), soft_wrap=True)
        if not calibration.good:
            console.print("[yellow]the links are not within 15 % of the rate: do not rely on the times[/yellow]")


def _conclude(cluster: Cluster, result: Result) -> None:
    pinned = "pinned" if result.pinned else "not pinned"
    table = Table(title=f"{result.seconds:.1f} s, {pinned}, exit code {result.code}")
    for column in ("rank", "node", "exit code", "node sent", "node received"):
        table.add_column(column, justify="right")
    for row in _rows(cluster, result):
        sizes = ["-" if row[key] is None else f"{row[key]:,} B" for key in ("node_bytes_sent", "node_bytes_received")]
        table.add_row(str(row["rank"]), str(row["node"]), str(row["exit_code"]), *sizes)
    console.print(table)
    if result.failed_rank is not None:
        console.print(f"[red]rank {result.failed_rank} failed with code {result.code}[/red]; the others were stopped")
    if result.timed_out:
        console.print("[red]timed out[/red]; all ranks were stopped")


def _rows(cluster: Cluster, result: Result) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rank, code in enumerate(result.codes):
        node, local = divmod(rank, cluster.ranks_per_node)
        row: dict[str, Any] = {"rank": rank, "node": node, "local_rank": local, "exit_code": code}
        for name in ("bytes_sent", "packets_sent", "bytes_received", "packets_received"):
            row[f"node_{name}"] = getattr(result.traffic[node], name) if result.traffic else None
        rows.append(row)
    return rows
