"""A rank of a training job on the emulated cluster: `python -m thinwire.lab.train --method fp32|CODEC --steps N`.

Plain DDP and one line for thinwire. Rank 0 prints progress as JSON lines on standard output: how many steps there will be,
then every step with the seconds since the run began, and statistics at the end.
"""

import argparse
import json
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

from ..ddp.wire import DDPWire
from .demo_setup import LEARNING_RATE, WORKLOAD
from .hard_exit import hard_exit
from .step_worker import sent
from .workloads import Workload, load

TRACED = 20
"""Number of steps in the middle of the run to trace for the report."""

MOMENTUM = 0.9
WARM_UP = 1 / 6
"""Share of the steps in which the learning rate rises; afterwards it falls along a cosine."""

FEWEST = 60
"""Steps of a run of given length, however slow: fewer teach the model nothing."""

MEASURING_SECONDS = 5.0
"""Allowance for what `auto` measures, and for steps that it leaves to DDP, where the number of steps is chosen by time."""


def rate_at(step: int, steps: int, peak: float = LEARNING_RATE) -> float:
    """The learning rate of a step: linear warm-up, then a cosine to zero."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def steps_within(seconds: float, step: float, compute: float) -> int:
    """How many steps plain DDP and thinwire can both take within `seconds`, if thinwire hides the network completely."""
    return max(FEWEST, int((seconds - MEASURING_SECONDS) / (step + compute)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default=WORKLOAD)
    parser.add_argument("--data", default=None)
    parser.add_argument(
        "--method", default="fp32", help="fp32 for plain DDP, auto, or a codec such as 'micro(density=0.01)'"
    )
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=60.0, help="without --steps: of two runs together")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--log", default=None, help="a folder for the journals of thinwire's runs")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = load(options.workload, data=options.data)
    steps = options.steps or _affordable(work, rank, options.seconds)
    _tell(rank, {"steps": steps, "began": time.time()})

    dist.barrier()
    begun, sent_before = time.perf_counter(), _sent()
    ddp = DistributedDataParallel(work.model(), bucket_cap_mb=4)
    wire = None if options.method == "fp32" else thinwire.attach(ddp, options.method, plan_file="")
    if wire is not None and options.log is not None:
        wire.log_to(options.log, summary=0, residual_every=5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.lr, momentum=MOMENTUM, nesterov=True)
    for step in range(steps):
        if wire is not None and options.log is not None and step == steps // 2:
            wire.trace(min(TRACED, steps - step))
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, options.lr)
        mean = _step(ddp, optimizer, work, step, rank)
        if wire is not None:
            wire.note(loss=mean)
        now = _sent()
        traffic = None if now is None or sent_before is None else now - sent_before
        _tell(rank, {"step": step, "loss": mean, "end": time.perf_counter() - begun, "sent": traffic})
    if wire is not None:
        stats = wire.stats()
        numbers = {key: stats.get(key) for key in ("steps", "bytes_per_step", "link_bytes_per_step", "residual_norm")}
        if isinstance(wire, DDPWire) and wire.tuner is not None:
            numbers["explained"] = wire.explain()
        _tell(rank, {"stats": numbers})
        wire.close()
    hard_exit()


def _step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, work: Workload, step: int, rank: int
) -> float:
    """One training step; returns the mean loss of all ranks."""
    optimizer.zero_grad()
    loss = work.loss(ddp, work.batch(step, rank))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


def _affordable(work: Workload, rank: int, seconds: float) -> int:
    """How many steps fit: some steps of plain DDP are timed, on a model that is thrown away. The same on all ranks."""
    ddp = DistributedDataParallel(work.model(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    times = []
    for step in range(5):
        begun = time.perf_counter()
        _step(ddp, optimizer, work, step, rank)
        times.append(time.perf_counter() - begun)
    with ddp.no_sync():
        begun = time.perf_counter()
        for step in range(3):
            work.loss(ddp, work.batch(step, rank)).backward()  # type: ignore[no-untyped-call]
        compute = (time.perf_counter() - begun) / 3
    found = torch.tensor(
        [sorted(times[2:])[1], compute], dtype=torch.float64
    )  # DDP rebuilds its buckets after the first
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return steps_within(seconds, *found.tolist())


def _sent() -> int | None:
    """Bytes that this node has sent, where it has an interface of its own."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return None if interface == "lo" else sent(interface)[0]


def _tell(rank: int, news: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(news), flush=True)


if __name__ == "__main__":
    main()
