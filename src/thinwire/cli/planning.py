"""Shared by `plan` and `simulate`: networks, published profiles, result rows."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..planner.network import NETWORKS, Network, parse_bytes_per_second
from ..suggest import suggest
from .console import console

if TYPE_CHECKING:
    from ..planner.plan import Plan
    from ..planner.published import Published
    from ..planner.simulation import Outcome, Simulation

SOURCES = "times of backward and codecs as published for a V100; times of links from their formulas"
FORWARD_HELP = "Forward time as a fraction of backward, which is all that published profiles contain."


def numbers(text: str, what: str = "--nodes") -> list[int]:
    """`8`, `2,4,8`, or `2..64` for the powers of two between them."""
    try:
        span = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
        found = [int(part) for part in (span.groups() if span else text.split(","))]
    except ValueError:
        found = []
    if found and min(found) < 1:
        raise PlanError(f"{what} must be at least 1, not {min(found)}")
    if not found or (span and found[0] > found[1]):
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
        raise PlanError("--model needs --profiles FILE, a file of backward profiles (docs/planning.md has its format)")
    from ..planner.published import Published

    return Published.load(path)


def ready() -> None:
    from ..planner.simulation import warm_up

    with console.status("loading the searches (the first run compiles them, which takes some seconds)"):
        warm_up()


def simulate(
    profiles: Published, model: str, codecs: list[str], density: float, network: Network, forward: float, **limits: Any
) -> Simulation:
    """`forward` is a fraction of backward; `limits` are options of `Simulation`."""
    from ..planner.simulation import Simulation

    tensors = profiles.model(model)
    backward = 1e-6 * sum(tensor.microseconds for tensor in tensors)
    chosen = [profiles.codec(name, density) for name in codecs]
    return Simulation(model, tensors, chosen, network, forward=forward * backward, **limits)


def row(simulation: Simulation, found: Outcome, dense: float, codec: str) -> dict[str, Any]:
    """The result row of one search. Seconds cover forward, backward and exchange."""
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


def measured_row(made: Plan) -> dict[str, Any]:
    """The result row of a plan for a measured job."""
    return {
        "model": made.model,
        "network": f"{made.cluster.nodes}x{made.cluster.ranks_per_node} {made.cluster.rate}".strip(),
        "nodes": made.cluster.nodes,
        "quality": made.quality,
        "search": made.search,
        "predicted_seconds": made.predicted_seconds,
        "bound_seconds": made.bound_seconds,
        "dense_seconds": made.dense_seconds,
        "search_seconds": made.search_seconds,
        "groups": len(made.groups),
        "tensors": len(made.tensors),
        "loss": made.loss,
        "scaling_factor": made.bound_seconds / made.predicted_seconds,
    }
