"""Codecs and chains that are measured for a job, by quality and by how long its steps are."""

from __future__ import annotations

from ..comm.world import World
from ..planner.plan import Quality

_HIGH = ("dense", "cast", "int8", "micro(density=0.05)", "micro(density=0.01)", "adacomp", "laplace(density=0.01)")
CANDIDATES: dict[Quality, tuple[str, ...]] = {
    "lossless": ("dense",),
    "high": _HIGH,
    "fast": (*_HIGH, "micro(density=0.001)", "randomblock", "lowrank"),
}
FEW = ("dense", "cast", "micro(density=0.01)", "adacomp")
"""For jobs with short steps: every further codec takes as long to load and measure as many of them."""
BETWEEN_NODES = ("dense via iRS eAR iAG", "micro(density=0.01) via iRS comp eARc dec iAG")
ROUNDS = 2
"""The most that one of them needs."""

SHORT_MEASUREMENT = 4.0
"""Seconds of measuring below which few codecs are measured."""


def candidates(quality: Quality, world: World, budget: float) -> tuple[str, ...]:
    """What to measure within `budget` seconds."""
    each, found = world.ranks_per_node, CANDIDATES[quality]
    if budget < SHORT_MEASUREMENT:
        found = tuple(text for text in FEW if text in found)
    layered = each is not None and 1 < each < world.size and quality != "lossless"
    return (*found, *BETWEEN_NODES) if layered else found
