"""What `plan` and `simulate` share: networks, codecs and rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..planner.costs import GpuCodec
from ..planner.network import NETWORKS, Network, parse_bytes_per_second
from ..planner.published import Published
from ..planner.simulation import Outcome, Simulation, warm_up
from ..suggest import suggest
from .console import console

SOURCES = "backward and codecs take what was published for one V100; links follow their formulas"
FORWARD_HELP = "Forward, as a share of backward: the published profiles have backward alone."


def numbers(text: str, what: str = "--nodes") -> list[int]:
    """`8`, `2,4,8`, or `2..64` for the powers of two between them."""
    try:
        span = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
        found = [int(part) for part in (span.groups() if span else text.split(","))]
    except ValueError:
        found = []
    if not found or min(found) < 1 or (span and found[0] > found[1]):
        raise PlanError(f"{text!r} is not a list of numbers: write {what} 8, {what} 2,4,8 or {what} 2..1024")
    if not span:
        return found
    low, high = found
    return [low] + [1 << k for k in range(high.bit_length()) if low < 1 << k < high] + [high] * (high > low)


def network(name: str, nodes: int, gpus: int, intra: str, inter: str) -> Network:
    if name not in NETWORKS:
        raise PlanError(f"there is no network {name!r}; {suggest(name, NETWORKS)}, or give --intra and --inter")
    chosen = replace(NETWORKS[name], nodes=nodes, gpus=gpus)
    if intra or inter:
        chosen = replace(
            chosen,
            intra=parse_bytes_per_second(intra) if intra else chosen.intra,
            inter=parse_bytes_per_second(inter) if inter else chosen.inter,
            name=f"intra {intra or name}, inter {inter or name}",
        )
    return chosen


def published(path: Path | None) -> Published:
    if path is None:
        raise PlanError(
            "--model needs --profiles FILE, a file of backward profiles (docs/planning.md says in what form)"
        )
    return Published.load(path)


def codecs(profiles: Published, names: list[str], density: float) -> list[GpuCodec]:
    return [profiles.codec(name, density) for name in names]


def ready() -> None:
    with console.status("loading the searches (compiled once, which takes some seconds)"):
        warm_up()


def row(simulation: Simulation, found: Outcome, dense: float, codec: str) -> dict[str, Any]:
    """One search on one model and network. Seconds are of forward, backward and exchange."""
    compressed = sum(
        simulation.elements[start:stop].sum()
        for start, stop, option in found.groups
        if simulation.option(option).codec is not None
    )
    return {
        "model": simulation.model,
        "network": str(simulation.network),
        "nodes": simulation.network.nodes,
        "gpus": simulation.network.gpus,
        "codec": codec,
        "cpu": simulation.cpu,
        "search": found.search,
        "predicted_seconds": found.seconds,
        "bound_seconds": simulation.bound,
        "dense_seconds": dense,
        "search_seconds": found.search_seconds,
        "search_cpu_seconds": found.search_cpu_seconds,
        "groups": len(found.groups),
        "tensors": len(simulation.tensors),
        "compressed_share": float(compressed / simulation.elements.sum()),
        "scaling_factor": simulation.bound / found.seconds if found.seconds else 1.0,
        "events_seconds": simulation.events(found.groups),
        "proven": found.proven,
    }
