"""Real ranks for tests: processes that are kept alive, with a hang timeout and the failing rank's traceback.

    results = run(3, job, argument)          # job(argument) on 3 ranks over gloo, results in rank order

`job` must be a function of a test module: it is imported by name in the ranks. A job that fails, hangs or kills its
process costs its pool; the next test gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
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
GLOO_SECONDS = 40.0


class RankError(AssertionError):
    """A rank raised: its traceback is the message."""


class _Pool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                process.kill()
        for process in self.processes:
            process.join()


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
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        for pipe in pool.pipes:
            pipe.send((job, args, store, gloo))
        results: list[tuple[str, Any] | None] = [None] * size
        while None in results:
            open_pipes = [pipe for pipe, result in zip(pool.pipes, results, strict=True) if result is None]
            ready = wait(open_pipes, timeout=hang)
            if not ready:
                stuck = [rank for rank, result in enumerate(results) if result is None]
                for rank in stuck:
                    with contextlib.suppress(OSError):
                        os.kill(pool.processes[rank].pid or 0, signal.SIGUSR1)  # prints all stacks
                time.sleep(1.0)
                pool.close()
                raise RankError(f"ranks {stuck} hang for {hang} s; the others: {results}")
            for pipe in ready:
                rank = pool.pipes.index(pipe)
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    pool.processes[rank].join()
                    results[rank] = ("exit", pool.processes[rank].exitcode)
    if all(result is not None and result[0] == "ok" for result in results):
        _pools[size] = pool
    else:
        pool.close()
    return [result for result in results if result is not None]


def run(size: int, job: Callable[..., Any], *args: Any, hang: float = HANG_SECONDS) -> list[Any]:
    """Run a job on `size` ranks; its results in rank order, or the tracebacks of the ranks that failed."""
    ended = outcomes(size, job, *args, hang=hang)
    failures = [f"rank {rank}: {kind}\n{what}" for rank, (kind, what) in enumerate(ended) if kind != "ok"]
    if failures:
        raise RankError("\n\n".join(failures))
    return [what for _, what in ended]


def _serve(rank: int, size: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
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
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
            os._exit(1)
        pipe.send(("ok", result))
