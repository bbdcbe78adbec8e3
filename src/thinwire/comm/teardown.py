"""Teardown of process groups: connections close, without waiting for a peer that does not answer.

When its last reference goes, a gloo group closes its connections and joins its threads, which may wait for a peer until the
timeout, aborted or not. So that happens in threads. None of these may return while the interpreter shuts down: the group's
destructor would then unwind the thread in a way that C++ forbids, and the process would abort.
"""

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

PATIENCE, LAST_PATIENCE = 0.5, 5.0
"""Seconds for the groups of one world: when it is closed, and when all groups of the job are destroyed."""

_lock = threading.Lock()
_threads: list[threading.Thread] = []
_kept: list[dist.ProcessGroup] = []
_ending = False
_numbers = itertools.count()


class _Entry(list[Any]):
    """A list, unlike one of the built-in kind, of which one can learn when it goes."""


def give_up_with_all(groups: list[dist.ProcessGroup], *holders: dict[Any, Any]) -> str:
    """Give up `groups` when the job destroys all its groups; empty `holders`, which refer to them as well.

    Otherwise their threads and connections would last as long as whoever holds them: a wire that is still referenced,
    or one that waits for the garbage collector.

    Torch has no callback for the destruction of groups. Its map from tags to groups is the last reference that it drops, so an
    entry there, under a tag that is never looked up, goes at the right moment: with an earlier one groups would end in the
    thread of the user, who would wait for a peer. Returns that tag, for `not_with_all`.
    """
    tag, entry = f"thinwire {next(_numbers)}", _Entry()
    dist.distributed_c10d._world.tags_to_pg[tag] = entry
    weakref.finalize(entry, _destroyed, groups, holders).atexit = False
    return tag


def not_with_all(tag: str) -> None:
    """The groups were given up before."""
    if dist.is_initialized():
        dist.distributed_c10d._world.tags_to_pg.pop(tag, None)


def _destroyed(groups: list[dist.ProcessGroup], holders: Iterable[dict[Any, Any]]) -> None:
    for holder in holders:
        holder.clear()
    give_up(groups, LAST_PATIENCE)


def give_up(groups: list[dist.ProcessGroup], patience: float = PATIENCE) -> None:
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
        # One thread per group: a group that waits for a peer must not block the others, which can close at once.
        begun = [
            threading.Thread(target=[groups.pop()].clear, name="thinwire-teardown", daemon=True) for _ in groups[:]
        ]
        for thread in begun:
            thread.start()
        _threads.extend(begun)
    _join(begun, patience)


@atexit.register
def _end() -> None:
    """At interpreter exit: wait briefly for running threads and start no others."""
    global _ending
    with _lock:
        _ending = True
        threads = list(_threads)
    _join(threads)


def _join(threads: Iterable[threading.Thread], patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
