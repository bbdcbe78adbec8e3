"""Deep Gradient Compression: the largest elements, by a threshold estimated from a sample."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from . import draws
from .base import Estimate, GroupInfo
from .sparse import SparseCodec, SparseState

TOO_MANY, TOO_FEW = 1.3, 0.8
LOWER = 0.8
ROUNDS = 10

Floats = NDArray[np.float32]


@dataclass
class DGCState(SparseState):
    rounds: int = 0
    """How many times the threshold was lowered in the last step."""


@dataclass(frozen=True)
class DGC(SparseCodec):
    """About `density` of the elements, the largest by magnitude; the threshold is that of a sample.

    The sample is every 1/`sample`-th element from a random start, at least 2 / density of them; its top-k gives the
    threshold. More than 1.3 k above it: the exact top-k of those. Fewer than 0.8 k: the threshold is multiplied by 0.8, at
    most ten times, each with another pass.

    With `momentum` (see `SparseCodec`) this is DGC except for gradient clipping, which belongs to the training loop.

    Bytes: as TopK.  Memory passes: the one that accumulates and selects, the cache lines of the sample and of what is
    taken; one read pass each time the threshold is lowered; one more pass with momentum.
    Source: Lin et al. 2018, "Deep gradient compression", with the constants of its published code.
    """

    sample: float = 0.01

    State: ClassVar[type[SparseState]] = DGCState

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.sample <= 1.0:
            raise ValueError(f"sample must be above 0 and at most 1, not {self.sample!r}")

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        assert isinstance(state, DGCState)
        flat, new = residual.numpy(), gradient.numpy()
        k, state.rounds = self.target(state.group), 0
        if k == 0:
            return True, state.indices[:0], state.values[:0]
        threshold = self._sampled(flat, new, state)
        if not np.isfinite(threshold):
            return kernels.sliced.accumulate(flat, new), state.indices[:0], state.values[:0]
        state.room(min(flat.size, 4 * k + 64))
        finite, count, _ = kernels.sliced.accumulate_collect(flat, new, threshold, state.indices, state.values)
        if not finite:
            return False, state.indices[:0], state.values[:0]
        while count < TOO_FEW * k and threshold > 0.0 and state.rounds < ROUNDS:
            threshold = float(np.float32(LOWER * threshold))
            state.rounds += 1
            count, _ = kernels.laplace.collect(flat, threshold, 0, state.indices, state.values)
        if count > state.values.size:
            state.room(count)
            kernels.laplace.collect(flat, threshold, 0, state.indices, state.values)
        indices, values = state.indices[:count], state.values[:count]
        if count > TOO_MANY * k:
            cut = kernels.laplace_search.exact_cut(values, k)
            count, _ = kernels.laplace.take_above(flat, indices, values, cut.threshold, cut.ties)
        else:
            kernels.basic.take(flat, indices, values)
        return True, indices[:count], values[:count]

    def _sampled(self, residual: Floats, gradient: Floats, state: DGCState) -> float:
        """The threshold that `density` of a sample of residual + gradient exceed."""
        elements = residual.size
        if self.target(state.group) >= sum(parameter.elements for parameter in state.group.parameters):
            return 0.0
        wanted = min(elements, max(1, round(self.sample * elements), round(min(elements, 2.0 / self.share))))
        stride = elements // wanted
        if stride > 32:
            stride = stride // 32 * 32 + 1  # odd, so that it does not sample a single column of a matrix
        bits = draws.generator("dgc", state.step, state.rank, state.group.name)
        start = int(draws.uniform(bits, 1)[0] * stride)
        with np.errstate(over="ignore", invalid="ignore"):
            sample = np.abs(residual[start::stride] + gradient[start::stride])
        k = max(1, round(self.share * sample.size))
        smallest = np.partition(sample, sample.size - k)[sample.size - k]
        # Kernels select magnitudes strictly above the threshold; the smallest selected one of the sample must be included.
        return float(np.nextafter(smallest, np.float32(0.0)))

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=super().estimate(group, world).gathered, passes=4.0 if self.momentum else 2.5)
