"""All-gather: the second step of a divisible scheme, and the indivisible collective of messages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .collective import Collective
from .flow import Flow, Stage, Steps, idle


def on_tensor(flow: Flow, stage: Stage) -> Steps:
    """The parts of p ranks come together on all of them.

    Rounds: one.  Bytes a rank: p - 1 times its part.  Wins after a reduce-scatter; together they cost an all-reduce.
    """
    if stage.count == 1:
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    assert flow.tensor is not None
    size, count = stage.before.range.size, stage.count
    part = flow.tensor[:size] if flow.tensor.numel() >= size else flow.padded(stage, size)
    if not stage.note:
        whole = flow.result_room(stage, count * size)
        yield Collective("gather", part, whole, stage.scope)
        flow.tensor = whole
        return
    send = flow.with_note(stage, part)
    received = flow.room(stage, "received", count * send.numel(), torch.uint8)
    yield Collective("gather", send, received, stage.scope)
    rows = flow.read_notes(stage, received.view(count, -1))
    whole = flow.result_room(stage, count * size)
    whole.view(torch.uint8).view(count, -1).copy_(rows)
    flow.tensor = whole


def on_messages(flow: Flow, stage: Stage) -> Steps:
    """The messages of p ranks come to all of them: of their parts after a first step, otherwise of the same elements.

    Rounds: one.  Bytes a rank: p - 1 times its messages.  Wins as the only collective for tiny messages and few ranks, and as
    a second step for messages that hold a sum already. After an all-to-all with no `dec` between, it carries p times more.
    """
    if stage.count == 1:
        if flow.messages is not None:
            flow.look(stage.position)
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    before, count = stage.before, stage.count
    send = flow.with_note(stage, flow.bundle(stage))
    received = flow.room(stage, "received", count * send.numel(), torch.uint8)
    yield Collective("gather", send, received, stage.scope)
    rows = flow.read_notes(stage, received.view(count, -1))
    flow.messages = _arrange(rows, before.sources, math.prod(before.splits), flow.capacity, stage)
    flow.look(stage.position)


def _arrange(rows: Tensor, sources: int, pieces: int, capacity: int, stage: Stage) -> Tensor:
    """uint8 [ranks, sources * pieces * capacity] as [sources, pieces, capacity] of what is held afterwards."""
    count = rows.shape[0]
    each = rows.view(count, sources, pieces, capacity)
    if len(stage.after.outer) < len(stage.before.outer):
        return each.transpose(0, 1).reshape(sources, count * pieces, capacity)
    return each.reshape(count * sources, pieces, capacity)
