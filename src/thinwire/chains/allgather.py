"""All-gather: the second step after a reduce-scatter or all-to-all, and the single-step exchange of messages."""

import math

import torch
from torch import Tensor

from ..comm.collectives import Collective
from .runtime import ChainRuntime, Stage, Steps


def on_tensor(runtime: ChainRuntime, stage: Stage) -> Steps:
    """Every rank receives the parts of all p ranks.

    Rounds: one.  Bytes per rank: (p - 1) * its part.  Wins after a reduce-scatter; together they cost an all-reduce.
    """
    assert runtime.tensor is not None
    size, count = stage.before.range.size, stage.count
    part = runtime.tensor[:size] if runtime.tensor.numel() >= size else runtime.padded(stage, size)
    if not stage.note:
        whole = runtime.result_room(stage, count * size)
        yield Collective("gather", part, whole, stage.scope)
        runtime.tensor = whole
        return
    send = runtime.with_note(stage, part)
    received = runtime.room(stage, "received", count * send.numel(), torch.uint8)
    yield Collective("gather", send, received, stage.scope)
    rows = runtime.read_notes(stage, received.view(count, -1))
    whole = runtime.result_room(stage, count * size)
    whole.view(torch.uint8).view(count, -1).copy_(rows)
    runtime.tensor = whole


def on_messages(runtime: ChainRuntime, stage: Stage) -> Steps:
    """Every rank receives the messages of all p ranks: of their parts after a first step, otherwise of the same elements.

    Rounds: one.  Bytes per rank: (p - 1) * its messages.  Wins as the only collective for tiny messages and few ranks, and as
    a second step for messages of sums. After an all-to-all without `dec` in between, it sends p times more.
    """
    before, count = stage.before, stage.count
    send = runtime.with_note(stage, runtime.bundle(stage))
    received = runtime.room(stage, "received", count * send.numel(), torch.uint8)
    yield Collective("gather", send, received, stage.scope)
    rows = runtime.read_notes(stage, received.view(count, -1))
    runtime.messages = _arrange(rows, before.sources, math.prod(before.splits), runtime.capacity, stage)


def _arrange(rows: Tensor, sources: int, pieces: int, capacity: int, stage: Stage) -> Tensor:
    """uint8 [ranks, sources * pieces * capacity] rearranged as [sources, pieces, capacity] of the state afterwards."""
    count = rows.shape[0]
    each = rows.view(count, sources, pieces, capacity)
    if len(stage.after.outer) < len(stage.before.outer):
        return each.transpose(0, 1).reshape(sources, count * pieces, capacity)
    return each.reshape(count * sources, pieces, capacity)
