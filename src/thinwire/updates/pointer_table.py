"""Addresses and options of a replica's tensors in one table, so that one kernel call covers all parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..errors import AttachError, ExchangeError
from .replica import ParameterSlot, Replica

LIMIT = 1e30
"""A gradient beyond it counts as not finite: then momentum, residual and sums stay finite too."""


class PointerTable:
    """What the kernels read and write of one replica; `refresh` before each use.

    Parameters, momenta and gradients may be other tensors in every step, so none of them is remembered.
    """

    def __init__(self, replica: Replica, residuals: Sequence[Tensor]) -> None:
        self.replica, self._residuals = replica, residuals  # which thus live as long as their addresses do
        self._rows = np.zeros((len(replica.slots), 6), np.int64)
        for row, slot, residual in zip(self._rows, replica.slots, residuals, strict=True):
            row[[0, 1, 5]] = slot.shared.data_ptr(), residual.data_ptr(), slot.info.elements  # these never move
        self._options = np.zeros((len(replica.slots), 5), np.float32)
        self._copies: dict[int, Tensor] = {}
        self._zeros = torch.zeros(0)

    # -- what the table points to --------------------------------------------------------------------------------------

    def refresh(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Read the addresses and options of all slots, or of some. `scale`: a factor for gradients."""
        if indices is None:
            self._copies.clear()
        groups, state = self.replica.options(), self.replica.optimizer.state
        numbers = {id(group): _numbers(group, scale) for group in self.replica.optimizer.param_groups}
        chosen = range(len(groups)) if indices is None else indices
        addresses, options = [], []
        for i in chosen:
            slot, momentum = self.replica.slots[i], 0
            if groups[i]["momentum"]:
                buffer = state[slot.point].get("momentum_buffer")
                if buffer is None:  # begins at zero, as SGD's does
                    buffer = state[slot.point]["momentum_buffer"] = torch.zeros_like(slot.shared)
                momentum = self._address(buffer, slot, "momentum")
            addresses.append((momentum, self._gradient(i), self._address(slot.point, slot, "parameter")))
            options.append(numbers[id(groups[i])])
        self._rows[chosen, 2:5] = addresses
        self._options[chosen] = options

    def _gradient(self, index: int) -> int:
        slot = self.replica.slots[index]
        gradient = slot.gradient()
        if gradient is None:  # unused in this step: zero, so that momentum and residual advance
            if self._zeros.numel() < slot.info.elements:
                self._zeros = torch.zeros(max(slot.info.elements for slot in self.replica.slots))
            return self._zeros.data_ptr()
        if not gradient.is_contiguous():
            gradient = self._copies[index] = gradient.detach().contiguous()
        return self._address(gradient, slot, "gradient")

    def _address(self, tensor: Tensor, slot: ParameterSlot, what: str) -> int:
        if tensor.dtype != torch.float32 or tensor.numel() != slot.info.elements or not tensor.is_contiguous():
            raise ExchangeError(
                f"the {what} of {slot.name!r} is now {tensor.dtype}, {tuple(tensor.shape)}, strides {tensor.stride()}: it "
                f"was float32, {slot.info.shape}, contiguous when LocalUpdates was made. Make a new LocalUpdates"
            )
        return tensor.data_ptr()

    # -- kernels -------------------------------------------------------------------------------------------------------

    def overflows(self, scale: float) -> bool:
        """Whether a gradient is not finite."""
        return not kernels.updates.all_within(self._rows, LIMIT / scale)

    def pending(self, places: NDArray[np.int64], out: Tensor) -> None:
        """Compute residual + update on blocks; `places` as in `buckets.Bucket`."""
        kernels.updates.all_pending(self._rows, self._options, places, out.numpy())

    def local_step(self) -> None:
        """Take a step that no exchange follows."""
        kernels.updates.all_drift(self._rows, self._options)
        self.mark_changed()

    def advance(self, strength: float, places: NDArray[np.int64], means: NDArray[np.float32]) -> bool:
        """Take a step, and put the means of blocks in place if they are there; False if an update is not finite."""
        return bool(kernels.updates.all_advance(self._rows, self._options, strength, places, means))

    def settle(self, places: NDArray[np.int64], means: Tensor) -> None:
        """Put means that arrived after `advance` in place."""
        kernels.updates.all_settle(self._rows, places, means.numpy())

    def squares(self, values: Tensor) -> float:
        return float(kernels.updates.squares(values.numpy()))

    def mark_changed(self) -> None:
        """Tell autograd that the parameters were changed in place."""
        torch.autograd.graph.increment_version([slot.parameter for slot in self.replica.slots])


def compile_kernels() -> None:
    """Compile every kernel of local updates."""
    rows, options = np.zeros((0, 6), np.int64), np.zeros((0, 5), np.float32)
    blocks, block = np.zeros((0, 4), np.int64), np.zeros(3, np.float32)
    kernels.updates.all_pending(rows, options, blocks, block)
    kernels.updates.all_advance(rows, options, 0.5, blocks, block)
    kernels.updates.all_drift(rows, options)
    kernels.updates.all_settle(rows, blocks, block)
    kernels.updates.all_within(rows, 1.0)
    kernels.updates.squares(block)


def unusual(group: dict[str, Any]) -> str | None:
    """An option of SGD that the kernels do not have, if one is switched on."""
    return next((option for option in ("dampening", "maximize", "differentiable") if group.get(option)), None)


def _numbers(group: dict[str, Any], scale: float) -> tuple[float, ...]:
    if option := unusual(group):
        raise AttachError(f"{option} was switched on after LocalUpdates was made: make a new LocalUpdates")
    nesterov = float(bool(group["nesterov"]))
    return float(group["lr"]), group["momentum"], group["weight_decay"], scale, nesterov
