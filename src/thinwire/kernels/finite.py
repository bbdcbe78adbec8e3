"""Whether a tensor holds no NaN and no infinity, on whatever device and in whatever dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(tensor: Tensor) -> bool:
    """Of a flat tensor; one read pass."""
    if tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu":
        from .cpu import basic

        return basic.all_finite(tensor.numpy())
    if tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.device.type == "cpu":
        from .cpu import basic

        return basic.all_finite_bf16(tensor.view(torch.int16).numpy())
    # A finite sum means finite terms; the slow test is only for sums that overflow.
    total = tensor.sum(dtype=torch.float32)
    return bool(torch.isfinite(total)) or bool(torch.isfinite(tensor).all())
