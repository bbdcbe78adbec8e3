"""What all ranks settle before the first exchange: that they mean the same, and that the kernels are compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..codecs import Codec
from ..errors import AttachError, ThinwireError
from ..version import __version__
from . import words
from .method import Method


def agree(group: dist.ProcessGroup | None, facts: Mapping[str, Any], error: str | None = None) -> None:
    """Compare `facts` over all ranks, a collective; raise on every rank if one has an error or another opinion.

    A mismatch found later does not raise in gloo: it aborts the peer.
    """
    mine = (
        {"version": __version__, "world": dist.get_world_size(group), **facts} if error is None else {"error": error}
    )
    everyone = words.gather(mine, group)
    if error is not None:
        raise AttachError(error)
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise AttachError(f"rank {rank} refuses: {theirs['error']}")
    for rank, theirs in enumerate(everyone):
        for key in mine:
            if everyone[0][key] != theirs[key]:
                raise AttachError(f"the ranks disagree: {_difference(key, everyone[0][key], theirs[key], rank)}")


def _difference(key: str, first: Any, other: Any, rank: int) -> str:
    if isinstance(first, list) and isinstance(other, list):
        for a, b in zip(first, other, strict=False):
            if a != b:
                return f"{key}: rank 0 has {_show(a)}, rank {rank} has {_show(b)}"
        return f"{key}: rank 0 has {len(first)}, rank {rank} has {len(other)}"
    return f"{key}: rank 0 has {first!r}, rank {rank} has {other!r}"


def _show(value: Any) -> str:
    return ", ".join(f"{key} {part!r}" for key, part in value.items()) if isinstance(value, dict) else str(value)


def problem_of(error: Exception) -> str:
    """What goes wrong on this rank, as one line for all of them."""
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def compile_kernels(group: dist.ProcessGroup | None, method: Method) -> None:
    """Compile what the codecs of a method need before training begins."""
    for codec, chain in {str(part.codec): (part.codec, part.chain) for part in method.parts}.values():

        def work(codec: Codec = codec, chain: str = chain) -> None:
            if str(codec) not in _rehearsed:  # chains need no other kernels
                rehearse(codec, chain)
            _rehearsed.add(str(codec))

        take_turns(group, work, f"{codec} fails in a rehearsal on 5000 elements")


def take_turns(group: dist.ProcessGroup | None, work: Callable[[], None], problem: str) -> None:
    """Let local rank 0 do something first, the others then find it on disk; raise on every rank if it fails on one."""
    failure: str | None = None
    first = int(os.environ.get("LOCAL_RANK", dist.get_rank(group))) == 0
    for turn in (True, False):
        if first is turn:
            try:
                work()
            except Exception as error:
                failure = f"{problem}: {type(error).__name__}: {error}"
        agree(group, {}, failure)


_rehearsed: set[str] = set()


def rehearse(codec: Codec, chain: str = "") -> None:
    """Run a few tiny steps in memory, a void one among them, so that every kernel of the codec is compiled."""
    from ..schemes.world import LocalWorld
    from .layout import build, describe
    from .runner import Runner

    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (50, 60), "kernel": (10, 8, 5, 5), "vector": (8,)}
    tensors = [describe(name, torch.empty(shape)) for name, shape in shapes.items()]
    ranks = 4 if chain else 2
    layout = build([tensors], codec, chain=chain, min_elements=64)
    runner = Runner(LocalWorld(ranks, ranks_per_node=2), layout)
    for step in range(4):
        buffers = [torch.randn(5008, generator=generator) for _ in range(ranks)]
        if step == 2:
            buffers[0][0] = float("nan")
        runner.submit(tuple(shapes), buffers, lambda _: None)
