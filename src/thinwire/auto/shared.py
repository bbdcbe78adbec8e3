"""Numbers and values that all ranks decide by: means over ranks, and what rank 0 makes for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..comm import object_collectives
from ..comm.world import TorchWorld
from ..errors import PlanError, ThinwireError


class _Answer(msgspec.Struct):
    """What rank 0 made, as JSON, or why it could not."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


def mean(world: TorchWorld, *numbers: float) -> list[float]:
    """The mean of each number over all ranks. A collective."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=world.parent)
    return [float(number) for number in tensor]


def from_rank_0(world: TorchWorld, make: Callable[[], Any], kind: Any) -> Any:
    """What rank 0 makes, of this type, on all ranks; an error there is one everywhere. A collective."""
    answer, failure = _Answer(), None
    if world.rank == 0:
        try:
            answer = _Answer(msgspec.Raw(msgspec.json.encode(make())))
        except Exception as error:  # the others wait to hear of it
            failure = error if isinstance(error, ThinwireError) else PlanError(f"{type(error).__name__}: {error}")
            answer = _Answer(error=str(failure))
    answer = object_collectives.broadcast(answer, _Answer, world.parent)
    if answer.error is not None:
        raise failure or PlanError(answer.error)
    try:
        return msgspec.json.decode(answer.value, type=kind)
    except msgspec.MsgspecError as error:
        raise PlanError(f"what rank 0 made cannot be read: {error}") from error
