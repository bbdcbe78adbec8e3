"""A DDP module whose buckets are the groups of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..engine.layout import Exclude
from ..planner.plan import Plan, Quality
from .attach import AUTO, attach
from .ddp import DDPWire


def wrap(
    model: nn.Module,
    codec: Codec | str | Plan = AUTO,
    *,
    quality: Quality = "high",
    plan_file: str | Path | None = None,
    chain: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
    **ddp_options: Any,
) -> tuple[DistributedDataParallel, DDPWire]:
    """`DistributedDataParallel(model, **ddp_options)` and `attach` in one, so that DDP's buckets can follow the plan.

    A group that is a bucket is exchanged where DDP has it, without a copy, as soon as its last gradient is there. Sizes of
    buckets that you give yourself are left alone.
    """
    if isinstance(codec, Plan) and not {"bucket_cap_mb", "bucket_cap_mb_list"} & set(ddp_options):
        caps = bucket_caps(codec)
        if caps:
            ddp_options["bucket_cap_mb_list"] = caps
    ddp = DistributedDataParallel(model, **ddp_options)
    options: Mapping[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
    return ddp, attach(ddp, codec, quality=quality, plan_file=plan_file, chain=chain, scaler=scaler, **options)


def bucket_caps(plan: Plan) -> list[float]:
    """The sizes, in MB as DDP counts them, at which its buckets end where the groups of a plan do.

    DDP closes a bucket with the tensor that reaches its cap. It begins the list anew for every dtype, so a plan with several
    gets none.
    """
    sizes = {tensor.name: math.prod(tensor.shape) * _size_of(tensor.dtype) for tensor in plan.tensors}
    if len({tensor.dtype for tensor in plan.tensors}) > 1:
        return []
    # A byte less, because DDP rounds what it makes of a fraction of a MB. No tensor is as small as that.
    return [max(1, sum(sizes[name] for name in group.names) - 1) / 2**20 for group in plan.groups]


def _size_of(dtype: str) -> int:
    return int(torch.empty(0, dtype=getattr(torch, dtype)).element_size())
