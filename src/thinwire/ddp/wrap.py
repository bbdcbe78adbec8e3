"""Wrap a model in a DDP module whose bucket sizes suit the codec: the groups of a plan, or falling sizes."""

import contextlib
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..chains.chain import choose
from ..codecs import Codec
from ..engine.layout import Exclude
from ..experimental.stream import StreamWire
from ..planner.plan import Plan, Quality
from .attach import AUTO, attach
from .wire import DDPWire


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
) -> tuple[DistributedDataParallel, DDPWire | StreamWire]:
    """`DistributedDataParallel(model, **ddp_options)` and `attach` in one, so that DDP's buckets can suit what is sent.

    With a plan they are its groups: a group that is a bucket is exchanged where DDP has it, without a copy, as soon as its
    last gradient is there. With a codec that compresses, and with "auto", which may choose one, they are few and become
    smaller towards the end of backward, see `falling_caps`. Sizes of buckets that you give yourself are left alone, and so
    are DDP's own with "dense".
    """
    if not {"bucket_cap_mb", "bucket_cap_mb_list"} & set(ddp_options):
        caps = bucket_caps(codec) if isinstance(codec, Plan) else []
        with contextlib.suppress(Exception):  # whatever is wrong with a codec, `attach` says it, on all ranks
            if codec == AUTO:
                caps = falling_caps(model) if quality != "lossless" else []
            elif not isinstance(codec, Plan) and choose(codec, chain)[0].keeps_residual:
                caps = falling_caps(model)
        if caps:
            ddp_options["bucket_cap_mb_list"] = caps
    ddp = DistributedDataParallel(model, **ddp_options)
    options: Mapping[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
    return ddp, attach(ddp, codec, quality=quality, plan_file=plan_file, chain=chain, scaler=scaler, **options)


LAST_SHARE, LAST_MB, GROWTH, LARGEST_MB = 0.3, (2.0, 32.0), 3, 128.0


def falling_caps(model: nn.Module) -> list[float]:
    """Sizes of buckets, in MB, for a codec that makes little of them: two in most models, the second one smaller.

    Each bucket has a fixed cost in addition to that of its bytes, so there are few, and none of the 1 MB with which DDP
    begins. Nothing hides what happens to the last one, so it is the smallest: 0.3 of all, within 2 and 32 MB. The first one
    must not come so late that a slow link has little to do before, and none is above 128 MB.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if len({parameter.dtype for parameter in parameters}) != 1:
        return []  # DDP starts the list again for every dtype
    rest = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
    low, high = LAST_MB
    size = min(max(rest * LAST_SHARE, low), high)
    caps: list[float] = []
    while rest > 1.5 * size:
        caps.insert(0, size)
        rest -= size
        size = min(GROWTH * size, LARGEST_MB)
    return [rest, *caps]


def bucket_caps(plan: Plan) -> list[float]:
    """The sizes, in MB as DDP counts them, at which its buckets end where the groups of a plan do.

    DDP closes a bucket with the tensor that reaches its cap. It starts the list again for every dtype, so a plan with several
    gets none.
    """
    sizes = {tensor.name: math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize for tensor in plan.tensors}
    if len({tensor.dtype for tensor in plan.tensors}) > 1:
        return []
    # A byte less, because DDP rounds what it makes of a fraction of a MB. No tensor is as small as that.
    return [max(1, sum(sizes[name] for name in group.names) - 1) / 2**20 for group in plan.groups]
