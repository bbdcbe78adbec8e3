"""Where the numbers of a replica lie, as the kernels read it: one call for all parameters, not one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import AttachError, ExchangeError
from .replica import Replica, Slot

LIMIT = 1e30
"""A gradient beyond it counts as not finite: then momentum, error and sums stay finite too."""


class Table:
    """Addresses and options of all slots of one replica; `look` brings them up to date.

    Parameters, momenta and gradients may be other tensors in every step, so nothing of them is remembered.
    """

    def __init__(self, replica: Replica, errors: Sequence[Tensor]) -> None:
        from ...kernels.cpu import updates

        self._within = updates.all_within
        self.replica, self._errors = replica, errors  # which thus live as long as their addresses do
        self.rows = np.zeros((len(replica.slots), 6), np.int64)
        for row, slot, error in zip(self.rows, replica.slots, errors, strict=True):
            row[[0, 1, 5]] = slot.shared.data_ptr(), error.data_ptr(), slot.info.elements  # these never move
        self.options = np.zeros((len(replica.slots), 5), np.float32)
        self._copies: dict[int, Tensor] = {}
        self._zeros = torch.zeros(0)

    def look(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """See what slots hold at this moment: all, or some. `scale` is what gradients are to be multiplied with."""
        if indices is None:
            self._copies.clear()
        groups, state = self.replica.options(), self.replica.optimizer.state
        numbers = {id(group): _numbers(group, scale) for group in self.replica.optimizer.param_groups}
        chosen = range(len(groups)) if indices is None else indices
        places, options = [], []
        for i in chosen:
            slot, momentum = self.replica.slots[i], 0
            if groups[i]["momentum"]:
                buffer = state[slot.point].get("momentum_buffer")
                if buffer is None:  # begins at zero, as SGD's does
                    buffer = state[slot.point]["momentum_buffer"] = torch.zeros_like(slot.shared)
                momentum = self._address(buffer, slot, "momentum")
            places.append((momentum, self._gradient(i), self._address(slot.point, slot, "parameter")))
            options.append(numbers[id(groups[i])])
        self.rows[chosen, 2:5] = places
        self.options[chosen] = options

    def _gradient(self, index: int) -> int:
        slot = self.replica.slots[index]
        gradient = slot.gradient()
        if gradient is None:  # backward did not meet it: zero, so that momentum and error go on
            if self._zeros.numel() < slot.info.elements:
                self._zeros = torch.zeros(max(slot.info.elements for slot in self.replica.slots))
            return self._zeros.data_ptr()
        if not gradient.is_contiguous():
            gradient = self._copies[index] = gradient.detach().contiguous()
        return self._address(gradient, slot, "gradient")

    def _address(self, tensor: Tensor, slot: Slot, what: str) -> int:
        if tensor.dtype != torch.float32 or tensor.numel() != slot.info.elements or not tensor.is_contiguous():
            raise ExchangeError(
                f"the {what} of {slot.name!r} is now {tensor.dtype}, {tuple(tensor.shape)}, strides {tensor.stride()}: it "
                f"was float32, {slot.info.shape}, contiguous when LocalUpdates was made. Make it anew"
            )
        return tensor.data_ptr()

    def bad(self, scale: float) -> bool:
        """Whether a gradient is not finite. After `look`."""
        return not self._within(self.rows, LIMIT / scale)


def unusual(group: dict[str, Any]) -> str | None:
    """An option of SGD that the kernels do not have, if one is switched on."""
    for option in ("dampening", "maximize", "differentiable"):
        if group.get(option):
            return option
    return None


def _numbers(group: dict[str, Any], scale: float) -> tuple[float, ...]:
    option = unusual(group)
    if option:
        raise AttachError(f"{option} was switched on after LocalUpdates was made; make it anew")
    nesterov = float(bool(group["nesterov"]))
    return float(group["lr"]), group["momentum"], group["weight_decay"], scale, nesterov
