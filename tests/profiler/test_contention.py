"""CPU contention told apart from slow links: the kernel's counters, and what follows from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from thinwire.profiler.contention import SCHEDULER, Load, LoadMeter, explains

CALM = Load(0.1, waited=0.002, switches=1.0)


@pytest.mark.parametrize(
    ("now", "cpu"),
    [
        (Load(0.25, waited=0.14, switches=30.0), True),
        (Load(0.25, waited=0.003, switches=1.0), False),  # the thread slept: it waited for a message
        (Load(0.25, waited=0.03, switches=5.0), False),  # a fifth of it
        (Load(0.25, stretched=0.1), True),  # the forward pass took longer than its thread worked
        (Load(0.25, switches=40.0), True),  # where run queues are not counted
        (Load(0.10, waited=0.05, switches=20.0), True),  # only messages took longer, as all does on a busy machine
        (Load(0.10, waited=0.002, switches=1.0), False),
        (Load(0.05, waited=0.0), False),
    ],
)
def test_what_explains_longer_steps(now: Load, cpu: bool) -> None:
    assert explains(CALM, now) is cpu


def test_an_end_of_contention_explains_shorter_steps() -> None:
    busy = Load(0.25, waited=0.14, switches=30.0)
    assert explains(busy, CALM)
    assert not explains(Load(0.25, waited=0.002), CALM), "links have become faster"


@pytest.mark.skipif(not SCHEDULER.exists(), reason="this kernel does not count run queues")
def test_a_crowded_core_is_counted() -> None:
    """Other processes and this thread take turns until it has lost its core often enough: no clock decides."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    loops = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        meter, waited, switches = LoadMeter(), 0.0, 0.0
        while waited < 0.02 or switches < 2:  # a hang is a failure, found by the suite
            sum(range(100_000))
            more = meter()
            waited, switches = waited + more[0], switches + more[1]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
            assert loop.stdout is not None
            loop.stdout.close()
