"""Broadcast: the second step after a reduce or gather to a root."""

import math

import torch

from ..comm.collectives import Collective
from .runtime import ChainRuntime, Stage, Steps


def on_tensor(runtime: ChainRuntime, stage: Stage) -> Steps:
    """Every rank receives the tensor of the first of p ranks.

    Rounds: one.  Bytes per rank: the tensor, pipelined.  Wins after a reduce, where that wins.
    """
    size = stage.after.range.elements
    if runtime.tensor is None:
        runtime.tensor = runtime.result_room(stage, size)
    tensor = runtime.tensor[:size]
    if not stage.note:
        yield Collective("broadcast", tensor, scope=stage.scope)
        return
    buffer = runtime.with_note(stage, tensor)
    yield Collective("broadcast", buffer, scope=stage.scope)
    (row,) = runtime.read_notes(stage, buffer.view(1, -1))
    tensor.view(torch.uint8).copy_(row)


def on_messages(runtime: ChainRuntime, stage: Stage) -> Steps:
    """Every rank receives the messages that the first of p ranks holds.

    Rounds: one.  Bytes per rank: all of these messages, pipelined.  Wins after a gather, where that wins.
    """
    after = stage.after
    pieces = math.prod(after.splits)
    if runtime.messages is None:
        held = runtime.room(stage, "received", after.sources * pieces * runtime.capacity, torch.uint8)
        runtime.messages = held.view(after.sources, pieces, runtime.capacity)
    buffer = runtime.with_note(stage, runtime.bundle(stage))
    yield Collective("broadcast", buffer, scope=stage.scope)
    (row,) = runtime.read_notes(stage, buffer.view(1, -1))
    runtime.messages = row.view(after.sources, pieces, runtime.capacity)
