"""All-to-all: the first step of a divisible scheme on messages."""

from __future__ import annotations

import torch

from .collective import Collective
from .flow import Flow, Stage, Steps, idle


def on_messages(flow: Flow, stage: Stage) -> Steps:
    """Each of p ranks gets the messages of one part from all of them. They are added by the `dec` that follows.

    Rounds: one.  Bytes a rank: (p - 1) / p of its messages.  Wins for quantizers and many ranks: a rank decodes only its own
    part, and what it receives does not grow with the number of ranks.
    """
    if stage.count == 1:
        if flow.messages is not None:
            flow.look(stage.position)
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    assert flow.messages is not None
    sources, pieces, capacity = flow.messages.shape
    send = flow.messages.view(-1)
    if sources > 1:
        send = flow.room(stage, "sent", send.numel(), torch.uint8)
        parts = flow.messages.view(sources, stage.count, pieces // stage.count, capacity)
        send.view(stage.count, sources, pieces // stage.count, capacity).copy_(parts.transpose(0, 1))
    received = flow.room(stage, "received", send.numel(), torch.uint8)
    yield Collective("all to all", send, received, stage.scope)
    flow.messages = received.view(stage.count * sources, pieces // stage.count, capacity)
    flow.look(stage.position)
