"""A job that has ended leaves nothing in a process that goes on; and the helper that says so does see what is left."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests import leaks
from tests.models import mlp, train, wrapped
from tests.plans import plan_of
from tests.ranks import outcomes, run
from tests.updates import jobs
from thinwire.auto.profiling import WATCHED
from thinwire.ddp.wire import DDPWire
from thinwire.errors import ThinwireError

SHAPES = {name: tuple(parameter.shape) for name, parameter in mlp().named_parameters()}
CODEC = "micro(density=0.05)"
KEPT: list[Any] = []


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def _attached(codec: Any, steps: int, **options: Any) -> DDPWire:
    ddp = wrapped()
    wire = thinwire.attach(ddp, codec, **options)
    train(ddp, _sgd(ddp), range(steps))
    return wire


def _micro() -> None:
    _attached(CODEC, 5)


def _plan() -> None:
    names = list(SHAPES)
    _attached(plan_of(SHAPES, [(names[:2], CODEC), (names[2:], "int8")], 2, each=2), 5)


def _auto_that_watches() -> None:
    _attached("auto", WATCHED - 2, plan_file="")


def _auto_that_has_measured() -> None:
    _attached("auto", WATCHED + 8, plan_file="")


def _auto_by_a_plan() -> None:
    plan = plan_of(SHAPES, [(list(SHAPES), CODEC)], 2, each=2)
    ddp = wrapped()
    wire = thinwire.attach(ddp, "auto", plan_file="", quality="fast")
    assert wire.tuner is not None
    wire.tuner.in_use.switch(plan, "at once")
    train(ddp, _sgd(ddp), range(3))  # before it is compared with anything
    assert wire.hooked


def _closed() -> None:
    _attached(CODEC, 5).close()


def _updates() -> None:
    model, opt = jobs.make_here()
    jobs.train_here(model, opt, range(4))


def _averages(exchange: thinwire.Exchange, calls: int) -> None:
    for _ in range(calls):
        exchange.reduce_({"w": torch.ones(4096)})


def _exchange() -> None:
    _averages(thinwire.Exchange({"w": torch.ones(4096)}, CODEC), 3)


def _one_rank_fails() -> None:
    ddp = wrapped()
    wire = thinwire.attach(ddp, CODEC)
    train(ddp, _sgd(ddp), range(4))
    if dist.get_rank() == 1:
        wire.close()
    with pytest.raises((ThinwireError, RuntimeError)):
        train(ddp, _sgd(ddp), range(4, 6))
    assert wire.error is not None


def _threads(expected: int) -> int:
    """How many threads this process has; of those that are ending the last are waited for."""
    deadline = time.monotonic() + leaks.PATIENCE
    while (found := len(leaks.native_threads())) > expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    "job",
    [
        _micro,
        _plan,
        _auto_that_watches,
        _auto_that_has_measured,
        _auto_by_a_plan,
        _closed,
        _updates,
        _exchange,
        _one_rank_fails,
    ],
)
def test_threads_do_not_grow_from_job_to_job(job: Any) -> None:
    run(2, job)
    before = run(2, _threads, 1 << 20)
    for _ in range(3):
        run(2, job)
    after = run(2, _threads, max(before))
    assert max(after) <= max(before)


def _wire_that_stays(store: str) -> None:
    """Destroys all process groups while an exchange is referenced; then begins anew for the caller."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wire = thinwire.Exchange({"w": torch.ones(4096)}, CODEC)
    _averages(wire, 3)
    dist.barrier()
    dist.destroy_process_group()
    # What is left is the default group, which the exchange knows as its parent, and the one that DDP keeps.
    most = 2 * sum(leaks.GLOO.values())
    deadline = time.monotonic() + leaks.PATIENCE
    while (left := _gloo_threads()) > most and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left <= most
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=40)
    )
    with pytest.raises(ThinwireError, match="destroyed"):
        _averages(wire, 1)


def _gloo_threads() -> int:
    counts = Counter(leaks.native_threads().values())
    return sum(counts[name] for name in leaks.GLOO)


def test_a_wire_that_is_still_referenced_has_no_threads_of_gloo(tmp_path: Path) -> None:
    run(2, _wire_that_stays, str(tmp_path / "store"))


# -- the helper ------------------------------------------------------------------------------------------------------------


def _keeps_a_thread() -> None:
    leaks.PATIENCE = 0.0
    thread = threading.Thread(target=threading.Event().wait, name="thinwire-forgotten", daemon=True)
    thread.start()


def _keeps_a_group() -> None:
    leaks.PATIENCE = 0.0
    KEPT.extend(dist.new_group([0, 1]) for _ in range(2))


@pytest.mark.parametrize(
    ("job", "words"),
    [(_keeps_a_thread, "thread 'thinwire-forgotten'"), (_keeps_a_group, "native threads gloo_tcp_loop")],
)
def test_what_a_job_leaves_in_a_rank_is_named(job: Any, words: str) -> None:
    for kind, text in outcomes(2, job):
        assert kind == "error"
        assert words in text


def test_processes_are_known_by_who_started_them() -> None:
    mark = os.environ[leaks.MARK]
    before = set(leaks._processes(mark))
    # The orphan itself says when it runs: a process that is being replaced by another program has no environment.
    script = "setsid sh -c 'echo $$; while :; do sleep 600; done' &"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        shell.stdout.close()
    try:
        left = leaks._new_processes(mark, before)
        assert any(line.startswith(f"process {pid}: ") and "sleep 600" in line for line in left)
    finally:
        os.killpg(pid, 9)
