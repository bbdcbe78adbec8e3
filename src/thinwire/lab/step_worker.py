"""A rank of `thinwire bench step`: runs all methods in one process, in turn.

Each method has its own copy of the model, DDP and optimizer. They warm up one after the other. Then all ranks visit all
methods, round by round; after every visit rank 0 prints its measurements as one JSON line. Ranks synchronize on a separate
process group, outside timed sections.
"""

import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

from ..ddp.wire import DDPWire
from ..engine.wire import Wire
from .bench_step import BASE, Options, name_and_size, sizes_of
from .hard_exit import hard_exit
from .method_spec import parse_updates
from .peers import ONE_BUCKET_MB, PEERS
from .workloads import Workload, load

PLAIN_WARM_UP = 5
UNCOUNTED = 1
"""Untimed steps at the start of a visit, which begin with caches full of another method's data, unlike steps of a real job."""


@dataclass
class MethodRun:
    """A method in its training loop."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire | None
    steps: int = 0

    @property
    def steps_of_wire(self) -> int:
        """Number of steps that the traffic covers; local updates also count steps without an exchange."""
        if isinstance(self.optimizer, thinwire.LocalUpdates):
            return self.optimizer.steps
        return self.wire.executor.statistics.steps if self.wire is not None and self.wire.executor is not None else 0

    def uncounted(self, steps: int) -> int:
        """Untimed steps before `steps` timed ones, such that visits cover all phases of a period in turn."""
        period = self.optimizer.period if isinstance(self.optimizer, thinwire.LocalUpdates) else 1
        return next(count for count in itertools.count(UNCOUNTED) if math.gcd(count + steps, period) == 1)

    def step(self, work: Workload, rank: int) -> tuple[float, float]:
        """Forward, backward and optimizer; returns wall seconds and CPU seconds of all threads."""
        batch = work.batch(self.steps, rank)
        self.steps += 1
        begun, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        work.loss(self.module, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.perf_counter() - begun, time.process_time() - cpu


def make(
    method: str, work: Workload, bucket_mb: float | None, bucket_view: bool = True, momentum: float = 0.0
) -> MethodRun:
    """`method` is a name of `bench_step`, or the text of a codec; the suffix `@4` sets DDP buckets of 4 MB.

    `@1/25/8` sets the size of each bucket.
    """
    name, own = name_and_size(method)
    model = work.model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    updates = parse_updates(name)
    if updates is not None:
        optimizer = thinwire.LocalUpdates(sgd, model, updates.codec, updates.feedback, updates.period)
        return MethodRun(model, optimizer, optimizer.exchange)
    wire: Wire | None = None
    module = model
    if name != "none":
        peer = PEERS.get(name)
        sizes = sizes_of(own) if own else [bucket_mb] if bucket_mb else None
        if peer is not None and peer.one_bucket:
            sizes = [ONE_BUCKET_MB]
        options: dict[str, Any] = {"gradient_as_bucket_view": bucket_view}
        if sizes and len(sizes) == 1:
            options["bucket_cap_mb"] = sizes[0]
        elif sizes:
            options["bucket_cap_mb_list"] = sizes  # fractions work
        if peer is None and name != BASE:
            ddp, made = thinwire.wrap(model, name, plan_file="", **options)
            assert isinstance(made, Wire)
            wire = made
        else:
            ddp = DistributedDataParallel(model, **options)
        if peer is not None:
            ddp.register_comm_hook(peer.state(), peer.hook)
        module = ddp
    return MethodRun(module, sgd, wire)


def sent(interface: str) -> tuple[int, int]:
    """Bytes and packets sent by this node, from the counters of its interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = numbers.split()
            return int(values[8]), int(values[9])
    return 0, 0


def handed_over(run: MethodRun) -> tuple[float, float, float]:
    """Totals of this rank: steps, bytes passed to collectives, and their expected traffic on its link."""
    wire = run.wire
    if wire is None or wire.executor is None:
        return 0, 0, 0
    statistics = wire.executor.statistics
    return run.steps_of_wire, statistics.bytes, statistics.link_bytes


class Visitor:
    """Visits methods and combines the measurements of all ranks."""

    def __init__(self, work: Workload, runs: list[MethodRun], interface: str) -> None:
        self.work, self.runs, self.interface = work, runs, interface
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group()

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def visit(self, run: MethodRun, steps: int) -> dict[str, Any]:
        """Time `steps` steps of a method after untimed ones. Seconds are those of the slowest rank, the rest are means."""
        seconds, cpu = [], 0.0
        for _ in range(run.uncounted(steps)):
            run.step(self.work, self.rank)
        before = handed_over(run)
        self.barrier()
        bytes_before, packets_before = sent(self.interface)
        for _ in range(steps):
            own, used = run.step(self.work, self.rank)
            cpu += used
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
            seconds.append(slowest.item())
        self.barrier()
        bytes_after, packets_after = sent(self.interface)
        wire = [now - then for now, then in zip(handed_over(run), before, strict=True)]
        numbers = [cpu, bytes_after - bytes_before, packets_after - packets_before, *wire]
        everyone = self._gather(torch.tensor(numbers, dtype=torch.float64))
        mean = everyone.mean(dim=0).tolist()
        return {
            "seconds": seconds,
            "cpu_seconds": mean[0] / steps,
            "bytes_sent": mean[1],
            "packets_sent": mean[2],
            "wire_steps": mean[3],
            "handed_bytes": mean[4],
            "traffic_bytes": mean[5],
        }

    def _gather(self, numbers: Tensor) -> Tensor:
        everyone = numbers.new_empty(self.world * numbers.numel())
        dist.all_gather_into_tensor(everyone, numbers, group=self.control)
        return everyone.view(self.world, -1)

    def peak_memory(self) -> int:
        """Peak memory in bytes of the largest rank, with all methods."""
        mine = torch.tensor([1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss], dtype=torch.float64)
        return int(self._gather(mine).max())


def keep_memory() -> None:
    """Keep freed memory in the process (glibc only).

    Otherwise, depending on the layout of the heap, some methods get memory back from the kernel in every step, page by page:
    up to 7000 pages and 5 ms of a 210 ms step.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(trim_threshold, (1 << 31) - 1)
        library.mallopt(mmap_threshold, 32 << 20)


def say(**news: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(news), flush=True)


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo")
    work = load(options.workload)
    runs = []
    for method in options.methods:
        runs.append(make(method, work, options.bucket_mb, options.bucket_view, options.momentum))
        say(made=method)
    visitor = Visitor(work, runs, os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    for place, run in enumerate(runs):
        # Thresholds and message sizes settle within tens of steps; without a wire, only DDP's second step differs.
        visitor.visit(run, options.warm_up if run.wire else min(options.warm_up, PLAIN_WARM_UP))
        say(warm=place)
    # A garbage collection during a step would affect one method and not another.
    gc.collect()
    gc.freeze()
    for round_ in range(options.rounds):
        for place, run in enumerate(runs):
            say(round=round_, method=place, **visitor.visit(run, options.steps_per_round))
    for place, run in enumerate(runs):
        if isinstance(run.wire, DDPWire) and run.wire.tuner is not None:
            say(explained=run.wire.explain(), method=place)
    say(peak_memory_bytes=visitor.peak_memory())
    hard_exit()


if __name__ == "__main__":
    main()
