"""Kernel warm-up before training: compile on one rank of a machine, let the others load the result from disk."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from ..codecs import Codec
from .compiler import announced
from .consensus import agree
from .rehearsal import rehearse
from .strategy import Strategy


def compile_kernels(group: dist.ProcessGroup | None, strategy: Strategy) -> None:
    """Compile what the codecs of a method need before training begins."""
    for codec, chain in {str(part.codec): (part.codec, part.chain) for part in strategy.assignments}.values():

        def work(codec: Codec = codec, chain: str = chain) -> None:
            if str(codec) not in _rehearsed:  # chains need no other kernels
                with announced(str(codec)):
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
