"""All-to-all: the counterpart of reduce-scatter for messages."""

import torch

from ..comm.collectives import Collective
from .runtime import ChainRuntime, Stage, Steps


def on_messages(runtime: ChainRuntime, stage: Stage) -> Steps:
    """Each of p ranks receives the messages of one part from all ranks. The next `dec` adds them.

    Rounds: one.  Bytes per rank: (p - 1) / p * its messages.  Wins for quantizers and many ranks: a rank decodes only its own
    part, and what it receives does not grow with the number of ranks.
    """
    assert runtime.messages is not None
    sources, pieces, capacity = runtime.messages.shape
    send = runtime.messages.view(-1)
    if sources > 1:
        send = runtime.room(stage, "sent", send.numel(), torch.uint8)
        parts = runtime.messages.view(sources, stage.count, pieces // stage.count, capacity)
        send.view(stage.count, sources, pieces // stage.count, capacity).copy_(parts.transpose(0, 1))
    received = runtime.room(stage, "received", send.numel(), torch.uint8)
    yield Collective("all to all", send, received, stage.scope)
    runtime.messages = received.view(stage.count * sources, pieces // stage.count, capacity)
