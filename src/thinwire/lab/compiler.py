"""What `thinwire compile` compiles: everything that codecs, `auto` and local updates need on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..engine.compiler import PLANNING, missing, prepare, rehearse, share_lock
from ..kernels import cache

UPDATES = "local updates"


@dataclass(frozen=True)
class Compiled:
    """For what, how many kernels that no other had needed before, and the seconds."""

    codec: str
    kernels: int
    seconds: float


def everything() -> list[str]:
    """What takes longest comes first."""
    from ..auto.candidates import BETWEEN_NODES, CANDIDATES
    from ..codecs import CODECS

    return list(dict.fromkeys(["adacomp", PLANNING, *CANDIDATES["fast"], *BETWEEN_NODES, UPDATES, *CODECS]))


def compile_for(texts: Sequence[str]) -> Iterator[Compiled]:
    """Fill the cache, by one process for each core; nothing comes for what is there already."""
    if not missing(texts):
        return
    with cache.locked("compiler"):
        absent = missing(texts)
        context = multiprocessing.get_context("spawn")
        if absent:
            cache.tidy()
            with context.Pool(min(os.cpu_count() or 1, len(absent)), _begin) as pool:
                yield from pool.imap_unordered(_compile, absent)


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
    share_lock()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _compile(text: str) -> Compiled:
    begun = time.monotonic()
    count = prepare(text, _updates if text == UPDATES else rehearse)
    return Compiled(text, count, time.monotonic() - begun)


def _updates(_: str) -> None:
    from ..updates.pointer_table import compile_kernels

    compile_kernels()
