"""What all ranks of a job with `auto` see together, every few steps: step time, a link, what is applied.

The numbers of the last steps are averaged while the next ones run; only the message that shows how fast a link is, in every
second look of a job with a codec, is waited for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.member import Member
from ..engine.watchdog import Watchdog
from ..planner.plan import Plan
from ..planner.profile import Profile
from ..profiler.links import probe
from ..schemes.world import TorchWorld

PERIOD = 8
"""Steps between two looks of all ranks."""

PROBED, SMALLEST_PROBE, LARGEST_PROBE, LARGEST_SHARE = 2, 1 << 16, 1 << 20, 0.05
"""While a codec runs, every second look times one message of so many bytes, of at most this share of a step: below 64 KB
what a link lets pass at once hides its rate."""


@dataclass(frozen=True)
class Seen:
    """Means over ranks of medians over some steps; whether rank 0 has a new plan; why a watchdog barked, if it did."""

    wall: float
    link: float
    planned: bool
    alarm: str = ""


@dataclass
class _Look:
    """Means over ranks that are under way: numbers, then what should have been applied; and what was applied."""

    work: Any
    means: Tensor
    applied: Tensor


class Lookout:
    """One rank's part in the looks. All of them call `step` equally often."""

    def __init__(self, world: TorchWorld, dog: Watchdog) -> None:
        self._world, self._dog = world, dog
        self.rest()

    def rest(self) -> None:
        """What was seen so far says nothing about what comes now."""
        self._walls: list[float] = []
        self._looks, self._void = 0, False
        self._under_way: _Look | None = None

    def step(self, wall: float, member: Member | None, planned: bool, probe_bytes: Callable[[], int]) -> Seen | None:
        """Note what a step took; every `PERIOD` steps, what all ranks saw in those before the last ones.

        member       of the codec, if one is running
        planned      whether this rank has a new plan
        probe_bytes  how large a message is to be timed
        """
        self._walls.append(wall)
        if member is not None:
            self._void |= member.last_off
        if len(self._walls) < PERIOD:
            return None
        last, self._under_way = self._under_way, self._issue(member, planned, probe_bytes)
        self._walls, self._void = [], False
        if last is None:
            return None
        last.work.wait()
        wall, link, anywhere, void = (float(number) for number in last.means[:4])
        verdict = self._dog.judge(last.means[4:], last.applied) if last.applied.numel() and not void else None
        return Seen(wall, link, bool(anywhere), verdict.reason if verdict is not None else "")

    def _issue(self, member: Member | None, planned: bool, probe_bytes: Callable[[], int]) -> _Look:
        """Begin to average what the ranks saw in the last steps."""
        self._looks += 1
        link, due, applied = 0.0, None, torch.empty(0)
        if member is not None:
            left = member.left()
            due = self._dog.due(left)
            if due is not None:
                applied = self._dog.applied()
            self._dog.begin(left)
            if self._looks % PROBED == 0:
                link = probe(self._world, probe_bytes())
        means = torch.tensor([statistics.median(self._walls), link, float(planned), float(self._void)])
        if due is not None:
            means = torch.cat([means, due])
        work = dist.all_reduce(means, op=dist.ReduceOp.AVG, group=self._world.parent, async_op=True)
        return _Look(work, means, applied)


def probe_bytes(profile: Profile | None, plan: Plan | None) -> int:
    """A message large enough to show the rate of a link, and small beside a step.

    A codec that suits a slow link hides that it has become fast: neither its steps nor its small messages tell.
    """
    size = SMALLEST_PROBE
    if profile is not None and plan is not None:
        link, allowed = profile.link("all_gather", "flat"), LARGEST_SHARE * plan.predicted_seconds
        while size < LARGEST_PROBE and link.seconds(2 * size) < allowed:
            size *= 2
    return size
