"""Real ranks for tests: processes that are kept alive, with the failing rank's traceback, or every rank's stacks.

    results = run(3, job, argument)          # job(argument) on 3 ranks over gloo, results in rank order

`job` must be a function of a test module: it is imported by name in the ranks. A job that fails, hangs or kills its
process costs its pool; the next test gets a new one.

A hang is no progress: no rank ends, and together they use next to no CPU time. On a busy machine everything takes
longer, and that is no failure; only a rank that spins for ever meets the ceiling on the clock.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

HANG_SECONDS = 60.0
"""Without progress."""
IDLE = 0.02
"""Share of a CPU per rank that is no progress: threads that poll while they wait use less, a rank that works uses more."""
CEILING_SECONDS = 600.0
"""For a job that uses CPU time and does not end."""
GLOO_SECONDS = 900.0
"""Longer than either: that a peer is slow is no error, and a hang is found above, with the stacks of all ranks."""

PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A rank raised or hangs: its traceback is the message, or the stacks of all ranks."""


class _Pool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")  # forks what has imported torch, which takes a second
        context.set_forkserver_preload(["tests.support.preloaded"])
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, there, str(self._file(rank))), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _file(self, rank: int) -> Path:
        return Path(self.folder.name) / f"stacks of rank {rank}"

    def cpu_seconds(self) -> float:
        return _cpu_seconds([process.pid for process in self.processes if process.pid is not None])

    def stacks(self) -> str:
        """Of every thread of every rank, which faulthandler writes even where Python itself is stuck."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGUSR1)
        written, texts = None, [""]
        for _ in range(50):  # until nothing more is written
            time.sleep(0.1)
            written, texts = texts, [self._read(rank) for rank in range(len(self.processes))]
            if all(texts) and texts == written:
                break
        return "\n\n".join(f"stacks of rank {rank}:\n{text}" for rank, text in enumerate(texts))

    def _read(self, rank: int) -> str:
        if not self.processes[rank].is_alive():
            return f"it has ended with {self.processes[rank].exitcode}"
        return self._file(rank).read_text() if self._file(rank).exists() else ""

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


def _cpu_seconds(roots: list[int]) -> float:
    """What these processes and their descendants have used."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # processes end at any time
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(
                map(int, fields[11:15])
            )  # user and system, with the children that ended
    total = 0
    for pid, used in ticks.items():
        ancestor = pid
        while ancestor and ancestor not in roots:
            ancestor = parents.get(ancestor, 0)
        total += used if ancestor else 0
    return total / os.sysconf("SC_CLK_TCK")


_pools: dict[int, _Pool] = {}


@atexit.register
def _close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()


def outcomes(
    size: int, job: Callable[..., Any], *args: Any, hang: float = HANG_SECONDS, gloo: float = GLOO_SECONDS
) -> list[tuple[str, Any]]:
    """Run a job and tell how it ended on each rank: ("ok", result), ("error", traceback), ("exit", code)."""
    pool = _pools.pop(size, None) or _Pool(size)
    results: list[tuple[str, Any] | None] = [None] * size
    try:
        with tempfile.TemporaryDirectory() as folder:
            for pipe in pool.pipes:
                with contextlib.suppress(BrokenPipeError):  # it has ended: its exit code is read below
                    pipe.send((job, args, str(Path(folder) / "store"), gloo))
            _collect(pool, results, hang)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            error.add_note(pool.stacks())
        pool.close()
        raise
    if all(result is not None and result[0] == "ok" for result in results):
        _pools[size] = pool
    else:
        pool.close()
    return [result for result in results if result is not None]


def _collect(pool: _Pool, results: list[tuple[str, Any] | None], hang: float) -> None:
    """Fill in the results as they come, as long as there is progress."""
    begun = moved = time.monotonic()
    used = pool.cpu_seconds()
    while None in results:
        open_pipes = [pipe for pipe, result in zip(pool.pipes, results, strict=True) if result is None]
        ready = wait(open_pipes, timeout=min(5.0, hang / 4))
        for pipe in ready:
            rank = pool.pipes.index(pipe)
            try:
                results[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                pool.processes[rank].join()
                results[rank] = ("exit", pool.processes[rank].exitcode)
        now = time.monotonic()
        if ready or pool.cpu_seconds() - used > IDLE * hang * len(results):
            moved, used = now, pool.cpu_seconds()
        elif now - moved > hang or now - begun > CEILING_SECONDS:
            stuck = [rank for rank, result in enumerate(results) if result is None]
            why = f"no progress for {hang:g} s" if now - moved > hang else f"busy for {CEILING_SECONDS:g} s"
            raise RankError(f"ranks {stuck} hang ({why}); the others: {results}")


def run(size: int, job: Callable[..., Any], *args: Any, hang: float = HANG_SECONDS) -> list[Any]:
    """Run a job on `size` ranks; its results in rank order, or the tracebacks of the ranks that failed."""
    ended = outcomes(size, job, *args, hang=hang)
    failures = [f"rank {rank}: {kind}\n{what}" for rank, (kind, what) in enumerate(ended) if kind != "ok"]
    if failures:
        raise RankError("\n\n".join(failures))
    return [what for _, what in ended]


def _serve(rank: int, size: int, pipe: Connection, stacks: str) -> None:
    file = open(stacks, "w")  # noqa: SIM115 - faulthandler writes into it as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a worker that is killed leaves no ranks behind

    import torch
    import torch.distributed as dist

    from tests import leaks

    torch.set_num_threads(1)
    gc.freeze()  # a collection after every job then looks at what jobs have made, and not at all of torch
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
    while True:
        try:
            job, args, store, gloo = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            torch.manual_seed(1234)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=gloo)
            )
            result = job(*args)
            dist.barrier()
            dist.destroy_process_group()
            gc.collect()
            leaks.check_rank()
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
            os._exit(1)
        pipe.send(("ok", result))
