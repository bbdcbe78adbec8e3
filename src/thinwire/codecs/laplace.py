"""Laplacian top-k: the largest elements, by a threshold that is estimated, corrected and carried over between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from .base import CodecState, Estimate, GroupInfo
from .sparse import VALUE_CODINGS, SparseCodec, SparseState

if TYPE_CHECKING:
    from ..kernels.cpu.laplace_fit import Fitted

LOOKED_AT = (1, 10, 100)
LOOKED_AT_EVERY = 1000
"""Exchanges in which a look is taken at how magnitudes are distributed, a pass over memory each, and every so many."""


def _cold() -> NDArray[np.float64]:
    return np.zeros(5)


@dataclass
class LaplaceState(SparseState):
    """The search state after the last valid step, a `laplace_search.Warm`; `next_warm` takes effect in `commit`."""

    warm: NDArray[np.float64] = field(default_factory=_cold)
    next_warm: NDArray[np.float64] = field(default_factory=_cold)
    passes: int = 0
    fitted: Fitted | None = None
    """How magnitudes were distributed in the step `fitted_at`; only a cold start depends on it."""
    fitted_at: int = -1

    saved: ClassVar[tuple[str, ...]] = ("warm", *SparseState.saved)

    def check(self) -> None:
        ranges.array("warm", self.warm)
        threshold, tail, k = self.warm[:3]
        if min(threshold, tail, k) < 0 or (tail > 0 and k < 1):
            raise ValueError(f"warm: no search leaves {self.warm.tolist()}")


@dataclass(frozen=True)
class LaplaceTopK(SparseCodec):
    """About `density` of the elements, the largest by magnitude; `exact=True` gives exactly the top-k.

    On a cold start the threshold comes from the distribution that is closest to the magnitudes, Laplace, Gauss or generalised
    Pareto, and is corrected by a bracketed search along the slope of the tail. Afterwards the last threshold is the first
    guess, and elements above it are taken in the pass that accumulates. Without `exact` the count may deviate by
    `tolerance`.

    Bytes: as TopK.  Memory passes: one when warm; with `exact`, and when the threshold moves fast, also the cache lines of the
    elements taken.  See `docs/methods/laplace.md`.
    """

    tolerance: float = 0.2
    exact: bool = False

    State: ClassVar[type[SparseState]] = LaplaceState

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.tolerance, int | float) and 0.0 < self.tolerance < 1.0):
            raise ValueError(f"tolerance must be between 0 and 1, not {self.tolerance!r}")

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        assert isinstance(state, LaplaceState)
        k = self.target(state.group)
        if k == 0:
            return True, state.indices[:0], state.values[:0]
        state.room(min(residual.numel(), 8 * k + 64))
        threshold, tail, before, drift, steady = state.warm.tolist()
        searches = tail == 0.0 and residual.numel() > state.indices.size  # then the search takes a look
        if _is_looked_at(state.step) and not searches:
            counts = kernels.laplace_fit.count((residual + gradient).numpy())
            self._note(None if counts is None else kernels.laplace_fit.fit(counts), state)
        picked = kernels.laplace_search.accumulate_pick(
            residual.numpy(),
            gradient.numpy(),
            k,
            kernels.laplace_search.Warm(threshold, tail, int(before), drift, bool(steady)),
            state.indices,
            state.values,
            self.tolerance,
            self.exact,
            int(VALUE_CODINGS[self.values]),
        )
        state.next_warm[:] = picked.warm
        state.passes, state.rounded = picked.passes, picked.rounded
        if state.fitted is None or _is_looked_at(state.step):  # a search may start anew at any step
            self._note(picked.fitted, state)
        return picked.finite, state.indices[: picked.taken], state.values[: picked.taken]

    @staticmethod
    def _note(fitted: Fitted | None, state: LaplaceState) -> None:
        if fitted is not None:
            state.fitted, state.fitted_at = fitted, state.step

    def commit(self, states: Sequence[CodecState]) -> None:
        super().commit(states)
        for state in states:
            assert isinstance(state, LaplaceState)
            state.warm[:] = state.next_warm

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=super().estimate(group, world).gathered, passes=3.0 if self.exact else 2.5)


def _is_looked_at(step: int) -> bool:
    return step + 1 in LOOKED_AT or (step + 1) % LOOKED_AT_EVERY == 0
