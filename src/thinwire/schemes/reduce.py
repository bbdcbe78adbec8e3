"""Reduce: the first step of a scheme with a root, on tensors."""

from __future__ import annotations

from .collective import Collective
from .flow import Flow, Stage, Steps, idle


def on_tensor(flow: Flow, stage: Stage) -> Steps:
    """The sum of p ranks comes to the first of them; the others hold nothing until the broadcast.

    Rounds: one.  Bytes a rank: the tensor, in a pipeline.  Wins where one rank of a node has the fast link, or for tensors so
    small that the number of messages counts.
    """
    if stage.count == 1:
        return
    if not stage.speaks:
        yield from idle(stage)
        return
    assert flow.tensor is not None
    yield Collective("reduce", flow.tensor[: stage.before.range.elements], scope=stage.scope)
    if not stage.after.holder:
        flow.tensor = None
