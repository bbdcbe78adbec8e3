"""Giving up process groups: their connections close, and nobody waits for a peer that does not answer.

With the last reference to it a gloo group closes its connections and joins its threads, which may wait for a peer until the
timeout, abort or not. So that happens in threads. One of them must not come back from it while the interpreter ends, or
the process is aborted: what the groups' destructor then does to the thread is forbidden in C++.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterable

import torch.distributed as dist

PATIENCE = 0.5
"""Seconds for the groups of one world."""

_lock = threading.Lock()
_threads: list[threading.Thread] = []
_kept: list[dist.ProcessGroup] = []
_ending = False


def give_up(groups: list[dist.ProcessGroup]) -> None:
    """Abort and destroy groups; `groups`, which should hold the last references, is empty afterwards."""
    for group in groups:
        group.abort()
    for group in groups:
        with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # the user destroyed all groups already
            dist.destroy_process_group(group)
    if not groups:
        return
    del group
    with _lock:
        if _ending:
            _kept.extend(groups)
            groups.clear()
            return
        _threads[:] = [thread for thread in _threads if thread.is_alive()]
        # One each: a group that waits for a peer must not keep the others, which can close at once.
        begun = [
            threading.Thread(target=[groups.pop()].clear, name="thinwire-farewell", daemon=True) for _ in groups[:]
        ]
        for thread in begun:
            thread.start()
        _threads.extend(begun)
    _join(begun)


@atexit.register
def _end() -> None:
    """Before the interpreter ends: let those finish that can, and begin no others."""
    global _ending
    with _lock:
        _ending = True
        threads = list(_threads)
    _join(threads)


def _join(threads: Iterable[threading.Thread]) -> None:
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
