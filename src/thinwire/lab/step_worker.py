"""One rank of `thinwire bench step`: every method in this process, visited in turn.

Each method has its own copy of the model, its own DDP and its own optimizer. They warm up one after the other. Then all ranks
visit all methods, round by round; after every visit rank 0 prints what it found as one JSON line. Ranks agree on a control
group of their own, outside what is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

from ..engine.wire import Wire
from ..frontends.auto import AutoWire
from .bench_step import BASE, name_and_size, sizes_of
from .farewell import leave
from .methods import updates_of
from .peers import ONE_BUCKET_MB, PEERS
from .workloads import Workload, load

PLAIN_WARM_UP = 5
UNCOUNTED = 1
"""Steps at the beginning of a visit that are not timed: they find the caches full of what another method worked with, as no
step of a job does that has its machine to itself."""


@dataclass
class Contestant:
    """One method in its training loop."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire | None
    steps: int = 0

    @property
    def steps_of_wire(self) -> int:
        """Steps that its traffic belongs to: local updates also take some without any."""
        if isinstance(self.optimizer, thinwire.LocalUpdates):
            return self.optimizer.steps
        return self.wire.runner.statistics.steps if self.wire is not None and self.wire.runner is not None else 0

    def uncounted(self, steps: int) -> int:
        """How many steps a visit of so many begins with: each step of a period is to be counted in its turn."""
        period = self.optimizer.period if isinstance(self.optimizer, thinwire.LocalUpdates) else 1
        return next(count for count in itertools.count(UNCOUNTED) if math.gcd(count + steps, period) == 1)

    def step(self, work: Workload, rank: int) -> tuple[float, float]:
        """Forward, backward and optimizer; its seconds, and those of the processor in all threads."""
        batch = work.batch(self.steps, rank)
        self.steps += 1
        begun, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        work.loss(self.module, batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.perf_counter() - begun, time.process_time() - cpu


def make(
    method: str, work: Workload, bucket_mb: float | None, bucket_view: bool = True, momentum: float = 0.0
) -> Contestant:
    """`method` is a name of `bench_step`, or the text of a codec; `@4` after it gives DDP buckets of 4 MB.

    `@1/25/8` gives each bucket its own size.
    """
    name, own = name_and_size(method)
    model = work.model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    updates = updates_of(name)
    if updates is not None:
        optimizer = thinwire.LocalUpdates(sgd, model, updates.codec, updates.feedback, updates.period)
        return Contestant(model, optimizer, optimizer.exchange)
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
            ddp, wire = thinwire.wrap(model, name, plan_file="", **options)
        else:
            ddp = DistributedDataParallel(model, **options)
        if peer is not None:
            ddp.register_comm_hook(peer.state(), peer.hook)
        module = ddp
    return Contestant(module, sgd, wire)


def sent(interface: str) -> tuple[int, int]:
    """Bytes and packets that this node has sent, as the kernel counted them on its interface."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = numbers.split()
            return int(values[8]), int(values[9])
    return 0, 0


def handed_over(contestant: Contestant) -> tuple[float, float, float]:
    """Steps so far, bytes that this rank has handed to collectives in them, and what these should have put on its link."""
    wire = contestant.wire
    if wire is None or wire.runner is None:
        return 0, 0, 0
    statistics = wire.runner.statistics
    traffic = sum(size for group in statistics.groups for scope, size in group.traffic.items() if scope != "intra")
    return contestant.steps_of_wire, statistics.bytes, traffic


class Judge:
    """Visits methods and agrees with the other ranks on what was seen."""

    def __init__(self, work: Workload, contestants: list[Contestant], interface: str) -> None:
        self.work, self.contestants, self.interface = work, contestants, interface
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.control = dist.new_group()

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def visit(self, contestant: Contestant, steps: int) -> dict[str, Any]:
        """Some steps of one method, after uncounted ones. Seconds are those of the slowest rank, the rest are means."""
        seconds, cpu = [], 0.0
        for _ in range(contestant.uncounted(steps)):
            contestant.step(self.work, self.rank)
        before = handed_over(contestant)
        self.barrier()
        bytes_before, packets_before = sent(self.interface)
        for _ in range(steps):
            own, used = contestant.step(self.work, self.rank)
            cpu += used
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
            seconds.append(slowest.item())
        self.barrier()
        bytes_after, packets_after = sent(self.interface)
        wire = [now - then for now, then in zip(handed_over(contestant), before, strict=True)]
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
        """Bytes of the largest rank, all methods together."""
        mine = torch.tensor([1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss], dtype=torch.float64)
        return int(self._gather(mine).max())


def keep_memory() -> None:
    """Memory that a step frees stays with the process, where the C library is glibc.

    Otherwise some methods get it back from the kernel in every step, page by page, and some never, as the heap happens to
    lie: up to 7000 pages and 5 ms of a step of 210.
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--methods", required=True, help="a JSON list")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a visit")
    parser.add_argument("--warm-up", type=int, required=True, help="steps of each method before all others")
    parser.add_argument("--bucket-mb", type=float, default=None)
    parser.add_argument("--no-bucket-view", action="store_true", help="DDP copies gradients out of its buckets")
    parser.add_argument("--momentum", type=float, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    keep_memory()
    dist.init_process_group("gloo")
    work = load(options.workload)
    contestants = []
    for method in json.loads(options.methods):
        contestants.append(make(method, work, options.bucket_mb, not options.no_bucket_view, options.momentum))
        say(made=method)
    judge = Judge(work, contestants, os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    for place, contestant in enumerate(contestants):
        # Thresholds and message sizes settle within tens of steps; without them there is only DDP's second step to wait for.
        judge.visit(contestant, options.warm_up if contestant.wire else min(options.warm_up, PLAIN_WARM_UP))
        say(warm=place)
    # A collection in the middle of a step would meet one method and not another.
    gc.collect()
    gc.freeze()
    for round_ in range(options.rounds):
        for place, contestant in enumerate(contestants):
            say(round=round_, method=place, **judge.visit(contestant, options.steps))
    for place, contestant in enumerate(contestants):
        if isinstance(contestant.wire, AutoWire):
            say(explained=contestant.wire.explain(), method=place)
    say(peak_memory_bytes=judge.peak_memory())
    leave()


if __name__ == "__main__":
    main()
