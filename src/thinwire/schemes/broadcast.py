"""Broadcast: the second step of a scheme with a root."""

from __future__ import annotations

import math

import torch

from .collective import Collective
from .flow import Flow, Stage, Steps, idle


def on_tensor(flow: Flow, stage: Stage) -> Steps:
    """The tensor of the first of p ranks comes to all of them.

    Rounds: one.  Bytes a rank: the tensor, in a pipeline.  Wins after a reduce, where that does.
    """
    if stage.count == 1:
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    size = stage.after.range.elements
    if flow.tensor is None:
        flow.tensor = flow.result_room(stage, size)
    tensor = flow.tensor[:size]
    if not stage.note:
        yield Collective("broadcast", tensor, scope=stage.scope)
        return
    buffer = flow.with_note(stage, tensor)
    yield Collective("broadcast", buffer, scope=stage.scope)
    (row,) = flow.read_notes(stage, buffer.view(1, -1))
    tensor.view(torch.uint8).copy_(row)


def on_messages(flow: Flow, stage: Stage) -> Steps:
    """The messages that the first of p ranks holds come to all of them.

    Rounds: one.  Bytes a rank: all of these messages, in a pipeline.  Wins after a gather, where that does.
    """
    if stage.count == 1:
        if flow.messages is not None:
            flow.look(stage.position)
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    after = stage.after
    pieces = math.prod(after.splits)
    if flow.messages is None:
        held = flow.room(stage, "received", after.sources * pieces * flow.capacity, torch.uint8)
        flow.messages = held.view(after.sources, pieces, flow.capacity)
    buffer = flow.with_note(stage, flow.bundle(stage))
    yield Collective("broadcast", buffer, scope=stage.scope)
    (row,) = flow.read_notes(stage, buffer.view(1, -1))
    flow.messages = row.view(after.sources, pieces, flow.capacity)
    flow.look(stage.position)
