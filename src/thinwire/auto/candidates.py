"""Codecs and chains that are measured for a job, by quality."""

from __future__ import annotations

from ..comm.world import World
from ..planner.plan import Quality

_HIGH = ("dense", "micro(density=0.01)", "cast", "adacomp", "laplace(density=0.01)", "micro(density=0.05)")
CANDIDATES: dict[Quality, tuple[str, ...]] = {
    "lossless": ("dense",),
    "high": _HIGH,
    "fast": (*_HIGH[:2], "micro(density=0.001)", *_HIGH[2:4], "randomblock", *_HIGH[4:], "lowrank"),
}
"""Those that plans need most come first: what comes last is not measured where time is short."""

BETWEEN_NODES = ("dense via iRS eAR iAG", "micro(density=0.01) via iRS comp eARc dec iAG")
ROUNDS = 2
"""The most that one of them needs."""


def candidates(quality: Quality, world: World) -> tuple[str, ...]:
    """What to measure, in this order."""
    each, found = world.ranks_per_node, CANDIDATES[quality]
    layered = each is not None and 1 < each < world.size and quality != "lossless"
    return (*found[:2], *BETWEEN_NODES, *found[2:]) if layered else found
