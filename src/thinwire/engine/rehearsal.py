"""Rehearsal of a codec: a few tiny steps in memory, in which everything that it calls is compiled."""

from __future__ import annotations

import torch

from ..codecs import Codec
from ..comm.world import LocalWorld
from .executor import Executor
from .layout import build, describe


def rehearse(codec: Codec, chain: str = "") -> None:
    """Run a few tiny steps in memory, a void one among them, so that every kernel of the codec is compiled."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (50, 60), "kernel": (10, 8, 5, 5), "vector": (8,)}
    tensors = [describe(name, torch.empty(shape)) for name, shape in shapes.items()]
    ranks = 4 if chain else 2
    layout = build([tensors], codec, chain=chain, min_elements=64)
    executor = Executor(LocalWorld(ranks, ranks_per_node=2), layout)
    for step in range(4):
        buffers = [torch.randn(5008, generator=generator) for _ in range(ranks)]
        if step == 2:
            buffers[0][0] = float("nan")
        executor.submit(tuple(shapes), buffers, lambda _: None)
