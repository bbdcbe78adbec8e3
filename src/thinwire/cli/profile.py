"""`thinwire profile`: measures a job as it is started, script unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..hooks import VARIABLE
from ..lab.results import result, write
from ..planner.profile import Profile
from .console import JsonFile, can_be_written, console, errors, failure, output


def profile(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="How the job is started: torchrun ... train.py ...")
    ],
    file: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the profile.", callback=can_be_written)
    ] = Path("profile.json"),
    budget: Annotated[
        float, typer.Option(help="Seconds for the measurements of links and codecs, after some steps.", min=0.5)
    ] = 15.0,
    rate: Annotated[str, typer.Option(help="What the network is called, for the record.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Watch some steps of a job, measure its links and codecs, write a profile, and end the job.

    The script is not changed: it must train a DistributedDataParallel. Start it as always, on every machine the same; the
    machine with rank 0 writes the file.

    Example: thinwire profile -o profile.json -- torchrun --nproc-per-node 2 train.py --batch-size 8
    """
    if shutil.which(command[0]) is None:
        raise failure(f"there is no command {command[0]!r}")
    path = file.resolve()
    with errors():
        before = path.stat().st_mtime_ns if path.exists() else None
        orders = {"do": "profile", "file": str(path), "budget": budget, "rate": rate}
        inject = str(Path(__file__).parent.parent / "injected")
        paths = [inject, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, VARIABLE: json.dumps(orders), "PYTHONPATH": os.pathsep.join(paths)}
        code = subprocess.run(command, env=environment, check=False).returncode
        if not path.exists() or path.stat().st_mtime_ns == before:
            if int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))) and not code:
                return  # another machine has rank 0
            raise failure(
                f"the command ended with code {code} before a profile was written; it takes a script that trains a "
                "DistributedDataParallel for at least six steps"
            )
        found = Profile.load(path)
        _show(found)
        if json_file is not None:
            write(json_file, result("profile", *_rows(found)))
    if code:
        sys.exit(code)


def _rows(profile: Profile) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Links and codecs, a line each, and the step."""
    rows: list[dict[str, Any]] = [
        {
            "collective": link.collective,
            "scope": link.scope,
            "latency_seconds": link.line(0),
            "seconds_per_byte": link.line.slope,
            "error": link.line.error,
        }
        for link in profile.links
    ]
    rows += [
        {
            "codec": cost.codec,
            "chain": cost.chain,
            "seconds_per_element": cost.encode.slope
            + cost.decode.slope
            + sum(round_.work.slope for round_ in cost.rounds),
            "bytes_per_element": sum(round_.bytes.slope for round_ in cost.rounds),
            "loss": cost.loss,
        }
        for cost in profile.codecs
    ]
    times = {name: getattr(profile, name) for name in ("forward", "backward", "optimizer", "native_seconds")}
    return rows, {"model": profile.model, "tensors": len(profile.tensors), "ranks": profile.cluster.world, **times}


def _show(profile: Profile) -> None:
    mega = sum(tensor.elements for tensor in profile.tensors) / 1e6
    milliseconds = [1000 * seconds for seconds in (profile.forward, profile.backward, profile.optimizer)]
    table = Table(
        title=f"{profile.model}: {len(profile.tensors)} tensors, {mega:.2f} M parameters, {profile.cluster.nodes} x "
        f"{profile.cluster.ranks_per_node} ranks; forward {milliseconds[0]:.1f} ms, backward {milliseconds[1]:.1f}, "
        f"optimizer {milliseconds[2]:.1f}; native step {1000 * profile.native_seconds:.1f}",
        title_justify="left",
    )
    for column in ("collective", "scope", "latency ms", "Mbit/s", "fit error"):
        table.add_column(column, justify="left" if column in ("collective", "scope") else "right")
    for link in profile.links:
        rate = f"{8e-6 / link.line.slope:.0f}" if link.line.slope else ""
        table.add_row(
            link.collective, link.scope, f"{1000 * link.line(0):.2f}", rate, f"{100 * link.line.error:.0f} %"
        )
    output.print(table)
    table = Table()
    for column in ("codec", "ns an element", "bytes an element", "loss"):
        table.add_column(column, justify="left" if column == "codec" else "right")
    for cost in profile.codecs:
        work = cost.encode.slope + cost.decode.slope + sum(round_.work.slope for round_ in cost.rounds)
        size = sum(round_.bytes.slope for round_ in cost.rounds)
        name = f"{cost.codec} via {cost.chain}" if cost.chain else cost.codec
        table.add_row(name, f"{1e9 * work:.2f}", f"{size:.3f}", f"{cost.loss:.3f}")
    output.print(table)
    for remark in profile.remarks:
        console.print(remark)
