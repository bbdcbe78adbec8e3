"""Gather: the first step of a scheme with a root, on messages."""

from __future__ import annotations

import torch

from .collective import Collective
from .flow import Flow, Stage, Steps, idle


def on_messages(flow: Flow, stage: Stage) -> Steps:
    """The messages of p ranks come to the first of them; the others hold nothing until the broadcast.

    Rounds: one.  Bytes: p - 1 times a rank's messages, into the root.  Wins for messages so small that latency decides.
    """
    if stage.count == 1:
        if flow.messages is not None:
            flow.look(stage.position)
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    send, root = flow.bundle(stage), stage.after.holder
    received = flow.room(stage, "received", stage.count * send.numel(), torch.uint8) if root else None
    yield Collective("collect", send, received, stage.scope)
    if received is None:
        flow.messages = None
        return
    assert flow.messages is not None
    sources, pieces, capacity = flow.messages.shape
    flow.messages = received.view(stage.count * sources, pieces, capacity)
    flow.look(stage.position)
