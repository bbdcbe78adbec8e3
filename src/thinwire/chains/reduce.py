"""Reduce to a root: the first step before a broadcast of tensors."""

from ..comm.collectives import Collective
from .runtime import ChainRuntime, Stage, Steps


def on_tensor(runtime: ChainRuntime, stage: Stage) -> Steps:
    """The first of p ranks receives the sum; the others hold nothing until the broadcast.

    Rounds: one.  Bytes per rank: the tensor, pipelined.  Wins where one rank of a node has the fast link, or for tensors so
    small that the number of messages counts.
    """
    assert runtime.tensor is not None
    yield Collective("reduce", runtime.tensor[: stage.before.range.elements], scope=stage.scope)
    if not stage.after.holder:
        runtime.tensor = None
