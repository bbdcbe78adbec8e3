"""SIDCo: the largest elements, by a threshold from a distribution that is fitted in stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from .base import CodecState, Estimate, GroupInfo
from .sparse import SparseCodec, SparseState

FIRST_RATIO = 0.25
PERIOD = 5
TOO_MANY, TOO_FEW = 1.2, 0.8
MOST_STAGES = 1100  # reached by the smallest positive float as density


@dataclass
class SIDCoState(SparseState):
    """The number of stages, and the elements selected since it was last adapted."""

    stages: int = 1
    upward: bool = True
    """Whether another stage selects more elements, as on short tails; on long tails it selects fewer."""
    steps: int = 0
    achieved: int = 0
    selected: int = 0
    """In this step; added to `achieved` in `commit`."""

    saved: ClassVar[tuple[str, ...]] = ("stages", "upward", "steps", "achieved", *SparseState.saved)

    def check(self) -> None:
        ranges.whole("stages", self.stages, 1, MOST_STAGES)
        ranges.whole("steps", self.steps, 0, PERIOD - 1)
        ranges.whole("achieved", self.achieved, 0)


@dataclass(frozen=True)
class SIDCo(SparseCodec):
    """About `density` of the elements, the largest by magnitude; the threshold is that of an exponential fit, refined.

    One stage: mean |x| * ln(1/density). With M stages the first one aims at a quarter of the elements, and each further one
    fits the exceedances of the one before, so that all together reach the density. Every 5 steps M decreases by one when more
    than 1.2 times the target was selected, and increases when less than 0.8 times, as published; where that would leave
    [1, stages_max] the direction is reversed (a long tail needs more stages to select fewer). The count of a single step is
    not corrected: until M has settled it can be many times the target, or almost nothing. The largest element is always
    sent, so that a single outlier cannot block everything.

    stages_max  largest number of stages; None: ceil(log2(1 / density)), as published

    Bytes: as TopK, when the fit is good.  Memory passes: the one that accumulates, one read pass per stage.
    Source: Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique", variant E.
    """

    stages_max: int | None = None

    State: ClassVar[type[SparseState]] = SIDCoState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages_max is not None:
            ranges.whole("stages_max", self.stages_max, 1)

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        assert isinstance(state, SIDCoState)
        flat, k = residual.numpy(), self.target(state.group)
        state.selected = 0
        if k == 0:
            return True, state.indices[:0], state.values[:0]
        finite, total, largest, _ = kernels.laplace.accumulate_measure(flat, gradient.numpy())
        if not finite:
            return False, state.indices[:0], state.values[:0]
        threshold = self._threshold(flat, total, largest, state)
        state.room(min(flat.size, 4 * k + 64))
        count, _ = kernels.laplace.collect(flat, threshold, 0, state.indices, state.values)
        if count > state.values.size:
            state.room(count)
            kernels.laplace.collect(flat, threshold, 0, state.indices, state.values)
        state.selected = count
        indices, values = state.indices[:count], state.values[:count]
        kernels.basic.take(flat, indices, values)
        return True, indices, values

    def _threshold(self, flat: NDArray[np.float32], total: float, largest: float, state: SIDCoState) -> float:
        elements = sum(parameter.elements for parameter in state.group.parameters)
        below_largest = float(np.nextafter(np.float32(largest), np.float32(0.0)))
        several = state.stages > 1 and self.share < FIRST_RATIO
        first = FIRST_RATIO if several else self.share
        threshold = _rounded(total / elements * math.log(1.0 / first), below_largest)
        if several:
            share = (self.share / FIRST_RATIO) ** (1.0 / (state.stages - 1))
            for _ in range(state.stages - 1):
                count, tail_total, smallest = kernels.sidco.tail(flat, threshold)
                if count == 0:
                    break
                mean = tail_total / count
                threshold = _rounded(smallest + (mean - smallest) * math.log(1.0 / share), below_largest)
        return threshold

    def most_stages(self) -> int:
        """The largest number of stages that adaptation may reach."""
        if self.share >= FIRST_RATIO:
            return 1
        most = math.ceil(math.log2(1.0 / self.share))
        return most if self.stages_max is None else min(most, self.stages_max)

    def commit(self, states: Sequence[CodecState]) -> None:
        super().commit(states)
        for state in states:
            assert isinstance(state, SIDCoState)
            state.steps += 1
            state.achieved += state.selected
            if state.steps >= PERIOD:
                self._adapt(state)
                state.steps = state.achieved = 0

    def _adapt(self, state: SIDCoState) -> None:
        ratio = state.achieved / state.steps / max(1, self.target(state.group))
        if TOO_FEW <= ratio <= TOO_MANY:
            return
        more = (ratio < TOO_FEW) == state.upward
        if not 1 <= state.stages + (1 if more else -1) <= self.most_stages():
            state.upward, more = not state.upward, not more
        state.stages = min(self.most_stages(), max(1, state.stages + (1 if more else -1)))

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=super().estimate(group, world).gathered, passes=4.5)


def _rounded(threshold: float, most: float) -> float:
    return float(np.float32(min(threshold, most)))
