"""What a test leaves behind: threads, processes, namespaces and files of ours fail it.

    from tests.leaks import nothing_is_left      # in tests/conftest.py: looks at this process after every test
    leaks.check_rank()                           # in a rank, when its job has destroyed all process groups

Everything is told by identity. Processes carry this worker's mark in their environment, wherever they are reparented to;
clusters are those that this worker has made, or that a test's own program has noted in the test's folder. What other
users of the machine do is not seen. Pools of ranks are kept from test to test, and do not count.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from thinwire.lab.leftovers import Record, directories, start_time
from thinwire.lab.netns import LabError, list_namespaces

PATIENCE = 30.0
"""Seconds for what is about to end; only a test that fails takes them."""

KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch._inductor")
"""Processes that Python and torch start once and keep, by a word of their command."""

KEPT_THREADS = ("multiprocessing/resource_sharer.py",)
"""Threads that Python starts once and keeps, by a file on their stack."""

LASTING = ("thinwire-signals",)
"""The thread that hears Ctrl-C: one of a process, as long as it lives."""

GLOO = {"gloo_tcp_loop": 1, "pt_gloo_runloop": 2}
"""Threads of one gloo group. DDP's constructor keeps the group of the last module alive until the next is made."""

MARK = "THINWIRE_TESTS"


class Leak(AssertionError):
    """Says what is left."""


# -- a rank ----------------------------------------------------------------------------------------------------------------


def native_threads() -> dict[int, str]:
    """All threads of this process, with the names that the kernel has."""
    found = {}
    for path in Path("/proc/self/task").iterdir():
        try:
            found[int(path.name)] = (path / "comm").read_text().strip()
        except OSError:  # it has just ended
            continue
    return found


def check_rank() -> None:
    """Raise if a job, which has destroyed its process groups, leaves threads of ours or of process groups."""
    left = _wait(lambda: [*_threads(set()), *_gloo()])
    if left:
        raise Leak("a job leaves behind:\n" + "\n".join(left))


def _gloo() -> list[str]:
    counts = Counter(native_threads().values())
    left = [f"{counts[name]} native threads {name}" for name, kept in GLOO.items() if counts[name] > kept]
    return left + _worlds() if left else []


def _worlds() -> list[str]:
    from thinwire.comm.world import TorchWorld

    found = [thing for thing in gc.get_objects() if type(thing) is TorchWorld and thing.groups]
    return [f"a world that holds {len(world.groups)} process groups" for world in found]


# -- the process of the tests ----------------------------------------------------------------------------------------------

_clusters: set[str] = set()


def _note_clusters() -> None:
    write = Record.write

    def noted(identity: str, about: dict[str, Any]) -> Record:
        _clusters.add(identity)
        return write(identity, about)

    Record.write = noted  # type: ignore[assignment,method-assign]


_note_clusters()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes, namespaces or files of clusters behind."""
    os.environ[MARK] = mark = f"{os.getpid()}.{start_time(os.getpid())}"
    threads, processes = {id(thread) for thread in threading.enumerate()}, set(_processes(mark))
    _clusters.clear()
    yield
    if "tmp_path" in request.node.funcargs:
        _clusters.update(_noted_in(request.node.funcargs["tmp_path"]))
    left = _wait(lambda: [*_threads(threads), *_new_processes(mark, processes), *_left_of_clusters()])
    if left:
        pytest.fail("the test leaves behind:\n" + "\n".join(left), pytrace=False)


def _wait(look: Callable[[], list[str]]) -> list[str]:
    """What is left when everything that is about to end has had the time for it."""
    deadline, pause = time.monotonic() + PATIENCE, 0.01
    while left := look():
        if time.monotonic() > deadline:
            return left
        gc.collect()  # what is forgotten ends when it is collected
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    return []


def _threads(before: set[int]) -> list[str]:
    """Threads of ours; and, where it is known which there were before, all that are new."""
    frames = sys._current_frames()
    found = []
    for thread in threading.enumerate():
        ours = thread.name.startswith("thinwire") and thread.name not in LASTING
        if id(thread) in before or not (ours or (before and thread.name not in LASTING)):
            continue
        frame = frames.get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        if any(place in stack for place in KEPT_THREADS):
            continue
        found.append(f"thread {thread.name!r}\n{stack}")
    return found


def _processes(mark: str) -> dict[int, str]:
    """Everything that this worker has started, directly or not: by process id, the command."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and start_time(int(entry.name)) is not None:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # somebody else's, or it has just ended
            continue
    return found


def _new_processes(mark: str, before: set[int]) -> list[str]:
    pools = {process.pid for pool in ranks._pools.values() for process in pool.processes}
    return [
        f"process {pid}: {command}"
        for pid, command in _processes(mark).items()
        if pid not in before and pid not in pools and not any(word in command for word in KEPT)
    ]


def _noted_in(folder: Path) -> set[str]:
    """Clusters of programs that a test has started, whose files lie in the test's own folder (see lab/conftest.py)."""
    files = [path for path in folder.glob("**/thinwire-lab*/*") if path.is_file()]
    return {record.identity for record in map(Record.read, files) if record is not None}


def _left_of_clusters() -> list[str]:
    if not _clusters:
        return []
    try:
        names = list_namespaces()
    except LabError:  # without `ip` there are none
        names = []
    left = [f"namespace {name}" for name in names if name.split("-")[0] in _clusters]
    for directory in directories():
        if directory.is_dir():
            left += [str(path) for path in directory.iterdir() if path.name.split(".")[0] in _clusters]
    return left
