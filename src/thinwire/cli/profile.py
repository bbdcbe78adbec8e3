"""`thinwire profile`: measures a training job without changes to its script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..lab.results import write
from .console import JsonFile, can_be_written, console, errors, failure, show

if TYPE_CHECKING:
    from ..planner.profile import CodecCost, Profile


def profile(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- COMMAND", help="The command that starts the job: torchrun ... train.py ..."),
    ],
    file: Annotated[
        Path, typer.Option("--output", "-o", help="Profile file to write.", callback=can_be_written)
    ] = Path("profile.json"),
    budget: Annotated[
        float, typer.Option(help="Seconds for measuring links and codecs, after the first steps.", min=0.5)
    ] = 15.0,
    rate: Annotated[str, typer.Option(help="Name of the network, recorded in the profile.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Observe a few steps of a job, measure its links and codecs, write a profile, and stop the job.

    The script needs no changes; it must train a DistributedDataParallel. Start it as usual, with the same command on every
    machine; the machine of rank 0 writes the file.

    Example: thinwire profile -o profile.json -- torchrun --nproc-per-node 2 train.py --batch-size 8
    """
    from ..autoattach.orders import VARIABLE
    from ..planner.profile import Profile

    if shutil.which(command[0]) is None:
        raise failure(f"there is no command {command[0]!r}")
    path = file.resolve()
    with errors():
        before = path.stat().st_mtime_ns if path.exists() else None
        orders = {"do": "profile", "file": str(path), "budget": budget, "rate": rate}
        inject = str(Path(__file__).parent.parent / "autoattach" / "injected")
        paths = [inject, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, VARIABLE: json.dumps(orders), "PYTHONPATH": os.pathsep.join(paths)}
        code = subprocess.run(command, env=environment, check=False).returncode
        if not path.exists() or path.stat().st_mtime_ns == before:
            if int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", "0"))) and not code:
                return  # another machine has rank 0
            raise failure(
                f"the command ended with code {code} before a profile was written; the script must train a "
                "DistributedDataParallel for at least six steps"
            )
        found = Profile.load(path)
        _show(found)
        write(json_file, "profile", *_rows(found))
    if code:
        sys.exit(code)


def _rows(profile: Profile) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row per link and codec, and a summary of the step."""
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
            "seconds_per_element": _seconds_per_element(cost),
            "bytes_per_element": _bytes_per_element(cost),
            "loss": cost.loss,
        }
        for cost in profile.codecs
    ]
    times = {name: getattr(profile, name) for name in ("forward", "backward", "optimizer", "native_seconds")}
    return rows, {"model": profile.model, "tensors": len(profile.tensors), "ranks": profile.cluster.world, **times}


def _seconds_per_element(cost: CodecCost) -> float:
    return cost.encode.slope + cost.decode.slope + sum(round_.work.slope for round_ in cost.rounds)


def _bytes_per_element(cost: CodecCost) -> float:
    return sum(round_.bytes.slope for round_ in cost.rounds)


def _show(profile: Profile) -> None:
    mega = sum(tensor.elements for tensor in profile.tensors) / 1e6
    links = [
        (
            link.collective,
            link.scope,
            f"{1000 * link.line(0):.2f}",
            f"{8e-6 / link.line.slope:.0f}" if link.line.slope else "",
            f"{100 * link.line.error:.0f} %",
        )
        for link in profile.links
    ]
    show(
        f"{profile.model}: {len(profile.tensors)} tensors, {mega:.2f} M parameters, {profile.cluster.nodes} x "
        f"{profile.cluster.ranks_per_node} ranks; forward {1000 * profile.forward:.1f} ms, backward "
        f"{1000 * profile.backward:.1f}, optimizer {1000 * profile.optimizer:.1f}; native step "
        f"{1000 * profile.native_seconds:.1f}",
        ("collective", "scope", "latency ms", "Mbit/s", "fit error"),
        links,
        left=("collective", "scope"),
    )
    codecs = [
        (
            f"{cost.codec} via {cost.chain}" if cost.chain else cost.codec,
            f"{1e9 * _seconds_per_element(cost):.2f}",
            f"{_bytes_per_element(cost):.3f}",
            f"{cost.loss:.3f}",
        )
        for cost in profile.codecs
    ]
    show("", ("codec", "ns per element", "bytes per element", "loss"), codecs, left=("codec",))
    for remark in profile.remarks:
        console.print(remark)
