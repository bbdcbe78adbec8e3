"""Gather to a root: the first step before a broadcast of messages."""

import torch

from ..comm.collectives import Collective
from .runtime import ChainRuntime, Stage, Steps


def on_messages(runtime: ChainRuntime, stage: Stage) -> Steps:
    """The first of p ranks receives the messages of all; the others hold nothing until the broadcast.

    Rounds: one.  Bytes: (p - 1) * the messages of a rank, into the root.  Wins for messages so small that latency decides.
    """
    send, root = runtime.bundle(stage), stage.after.holder
    received = runtime.room(stage, "received", stage.count * send.numel(), torch.uint8) if root else None
    yield Collective("collect", send, received, stage.scope)
    if received is None:
        runtime.messages = None
        return
    assert runtime.messages is not None
    sources, pieces, capacity = runtime.messages.shape
    runtime.messages = received.view(stage.count * sources, pieces, capacity)
