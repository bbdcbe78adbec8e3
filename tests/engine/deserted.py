"""One of the ranks of a job that is left by a peer: run by `test_interrupt.py` and `test_vanish.py`.

    python -m tests.engine.deserted RANK WORLD STORE FAULT WAY...

FAULT  interrupt: the last rank stays away after a few steps, the others get Ctrl-C while they wait for it
       absent: the same, but the last rank does not even come to the beginning
       stop: the last rank stops (SIGSTOP), the others wait until their timeout
       pause: the last rank stops, and somebody else lets it go on; then all make some more steps
       quiet: nothing; somebody else cuts the cable
WAY    attach:CODEC, exchange:CODEC or updates:CODEC; all of them begin before the fault, and meet it one after the other
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist

import thinwire
from tests.models import train, wrapped
from tests.support.limits import CEILING
from tests.updates.jobs import make_here, train_here
from thinwire import Wire
from thinwire.comm.world import TorchWorld

ROOT = Path(__file__).parents[2]
PATIENCE = timedelta(seconds=8)
"""Of exchanges that meet a cable that is cut: steps before that must not take as long."""
IMPATIENCE = timedelta(seconds=0.5)
"""Of exchanges with a rank that has stopped, when it has stopped: it will not answer, however long they wait."""
BEGUN = 4


def job(way: str, codec: str, timeout: timedelta | None) -> tuple[Callable[[range], object], Sequence[Wire]]:
    """What makes steps, and the wires that it makes them with."""
    if way == "attach":
        ddp = wrapped()
        wire = thinwire.attach(ddp, codec, min_elements=100, timeout=timeout)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        return lambda steps: train(ddp, optimizer, steps), [wire]
    if way == "updates":
        model, opt = make_here(codec, timeout=timeout)
        return lambda steps: train_here(model, opt, steps), opt._backend.wires
    tensors = {"weight": torch.zeros(5000), "bias": torch.zeros(10)}
    exchange = thinwire.Exchange(tensors, codec, timeout=timeout, min_elements=100)

    def reduce(steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            exchange.reduce_({name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()})

    return reduce, [exchange]


def threads_left(wires: Sequence[Wire]) -> int:
    """Threads of closed wires that do not end by themselves."""
    threads = [wire.session._thread for wire in wires if wire.error is not None]
    mine = [thread.thread for thread in threads if thread is not None]
    for thread in mine:
        thread.join(timeout=10)
    return sum(thread.is_alive() for thread in mine)


def wait_no_longer_than(timeout: timedelta) -> None:
    """Change the timeout of all exchanges that there are."""
    for world in [thing for thing in gc.get_objects() if type(thing) is TorchWorld]:
        for group in world.groups:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


class Ranks:
    """The processes of such a job, which do not outlive the test."""

    def __init__(self, world: int, folder: Path, fault: str, *ways: str) -> None:
        command = [sys.executable, "-m", "tests.engine.deserted"]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(folder / "store"), fault, *ways],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]

    def end_of(self, rank: int) -> tuple[str, int]:
        """What a rank has printed until it ended by itself, and its exit code."""
        text, _ = self.processes[rank].communicate(timeout=CEILING)
        return text, self.processes[rank].returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def press_soon() -> None:
    """Ctrl-C in half a second."""

    def press() -> None:
        print("pressed", flush=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(0.5, press).start()


def main(rank: int, world: int, store: str, fault: str, *ways: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
    torch.set_num_threads(1)
    method = store if "://" in store else f"file://{store}"
    dist.init_process_group("gloo", method, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    leaves = rank == world - 1
    if fault == "absent":
        if leaves:
            time.sleep(2 * CEILING)  # ended by the test
        press_soon()
    jobs = [job(*way.split(":", 1), PATIENCE if fault == "quiet" else None) for way in ways]
    for run, _ in jobs:
        run(range(BEGUN))
    print("begun", flush=True)
    if leaves and fault == "interrupt":
        time.sleep(2 * CEILING)
    if fault == "stop":
        if leaves:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_no_longer_than(IMPATIENCE)
    if fault == "pause":
        if leaves:
            os.kill(os.getpid(), signal.SIGSTOP)
        for run, wires in jobs:
            run(range(BEGUN, 3 * BEGUN))
            print(f"steps {wires[0].stats()['steps']}, {wires[0].error}", flush=True)
        return
    for way, (run, wires) in zip(ways, jobs, strict=True):
        if fault == "interrupt":
            press_soon()
        try:
            run(range(BEGUN, 10**9))
        except KeyboardInterrupt:
            print(f"{way}: interrupted", flush=True)
            if way == ways[-1]:
                raise
        except RuntimeError as failure:
            print(f"{way}: failed: {failure}", flush=True)
        print(f"{way}: threads left: {threads_left(wires)}", flush=True)
        print(f"{way}: closed by: {next((w.error for w in wires if w.error is not None), None)}", flush=True)
        try:
            run(range(1))
        except RuntimeError as failure:
            print(f"{way}: then: {failure}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
