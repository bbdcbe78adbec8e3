"""Monitor of a tuned job: step time, link time and watchdog alarms, averaged over all ranks every few steps.

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

from ..comm.world import TorchWorld
from ..engine.rank_state import RankState
from ..engine.watchdog import Watchdog
from ..planner.plan import Plan
from ..planner.profile import Profile
from ..profiler.contention import Load

PERIOD = 8
"""Steps between two snapshots of all ranks."""

NUMBERS = 7
"""Numbers that are averaged before those of the watchdog."""

PROBED, SMALLEST_PROBE, LARGEST_PROBE, LARGEST_SHARE = 2, 1 << 16, 1 << 20, 0.05
"""While a codec runs, every second snapshot times one message of so many bytes, of at most this share of a step: below 64 KB
what a link lets pass at once hides its rate."""


@dataclass(frozen=True)
class Snapshot:
    """Means over ranks of medians over some steps; whether rank 0 has a new plan; reason for a watchdog alarm, or empty."""

    load: Load
    link: float
    planned: bool
    alarm: str = ""


@dataclass
class _Reduction:
    """Means over ranks that are under way: numbers, then what should have been applied; and what was applied."""

    work: Any
    means: Tensor
    applied: Tensor


class Monitor:
    """One rank's part in the snapshots. All ranks call `step` equally often."""

    def __init__(self, world: TorchWorld, watchdog: Watchdog) -> None:
        self._world, self._watchdog = world, watchdog
        self.rest()

    def rest(self) -> None:
        """What was seen so far says nothing about what comes now."""
        self._walls: list[float] = []
        self._stretched: list[float] = []
        self._snapshots, self._void = 0, False
        self._under_way: _Reduction | None = None

    def step(
        self,
        step: tuple[float, float],
        rank_state: RankState | None,
        planned: bool,
        probe: Callable[[], float],
        load: Callable[[], tuple[float, float]],
    ) -> Snapshot | None:
        """Note what a step took; every `PERIOD` steps, what all ranks saw in those before the last ones.

        step        its seconds, and those that its forward pass was without a core
        rank_state  of the codec, if one is running
        planned     whether this rank has a new plan
        probe       times one message between all ranks; a collective
        load        seconds without a core and involuntary switches, since the last call
        """
        self._walls.append(step[0])
        self._stretched.append(step[1])
        if rank_state is not None:
            self._void |= rank_state.last_void
        if len(self._walls) < PERIOD:
            return None
        last, self._under_way = self._under_way, self._issue(rank_state, planned, probe, load())
        self._walls, self._stretched, self._void = [], [], False
        if last is None:
            return None
        last.work.wait()
        wall, waited, switches, stretched, link, anywhere, void = (float(number) for number in last.means[:NUMBERS])
        judged = last.means[NUMBERS:]
        verdict = self._watchdog.judge(judged, last.applied) if last.applied.numel() and not void else None
        seen = Load(wall, waited, switches, stretched)
        return Snapshot(seen, link, bool(anywhere), verdict.reason if verdict is not None else "")

    def _issue(
        self,
        rank_state: RankState | None,
        planned: bool,
        probe: Callable[[], float],
        load: tuple[float, float],
    ) -> _Reduction:
        """Begin to average what the ranks saw in the last steps."""
        self._snapshots += 1
        link, due, applied = 0.0, None, torch.empty(0)
        if rank_state is not None:
            unsent = rank_state.unsent()
            due = self._watchdog.due(unsent)
            if due is not None:
                applied = self._watchdog.applied()
            self._watchdog.begin(unsent)
            if self._snapshots % PROBED == 0:
                link = probe()
        wall, stretched = statistics.median(self._walls), statistics.median(self._stretched)
        waited, switches = (count / PERIOD for count in load)
        means = torch.tensor([wall, waited, switches, stretched, link, float(planned), float(self._void)])
        assert len(means) == NUMBERS
        if due is not None:
            means = torch.cat([means, due])
        work = dist.all_reduce(means, op=dist.ReduceOp.AVG, group=self._world.parent, async_op=True)
        return _Reduction(work, means, applied)


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
