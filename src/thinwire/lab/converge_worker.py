"""A rank of a time-to-accuracy run: plain DDP, trained until the metric on test data reaches the target.

Rank 0 prints the result as one JSON line. Times include the set-up of the method and all steps, but not evaluations. DDP
exchanges during backward, so gradient clipping applies to the mean.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire

from .. import traffic
from ..engine.wire import Wire
from .bench_step import BASE
from .converge_time import PLAN, is_auto
from .hard_exit import hard_exit
from .peers import ONE_BUCKET_MB, PEERS
from .step_worker import sent
from .tasks import Task, load
from .trainers import Method


class Job:
    """A model and its optimizer, with the exchange method attached."""

    def __init__(self, task: Task, text: str, seed: int) -> None:
        self.task, self.seed = task, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = task.model(seed)
        self.module: nn.Module = self.model
        self.updates: thinwire.LocalUpdates | None = None
        self.auto: Wire | None = None
        peer = PEERS.get(text)
        auto = is_auto(text)
        plan = thinwire.Plan.load(text) if text.endswith(PLAN) and not auto else None
        method = Method.parse(text) if peer is None and plan is None and not auto and text != BASE else None
        self.factor = method.lr / task.recipe.lr if method is not None and method.lr else 1.0
        inner = task.recipe.make(self.model.parameters(), corrected=method.momentum if method is not None else 0.0)
        self.optimizer = inner
        if method is not None and method.updates is not None:
            way = method.updates
            self.updates = thinwire.LocalUpdates(inner, self.model, way.codec, way.feedback, way.period)
            self.optimizer = self.updates
            return
        one_bucket = peer is not None and peer.one_bucket
        ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=ONE_BUCKET_MB if one_bucket else None, gradient_as_bucket_view=True
        )
        self.module = ddp
        if peer is not None:
            ddp.register_comm_hook(peer.state(), peer.hook)
        elif auto:
            wire = thinwire.attach(ddp, plan_file=text.partition("@")[2])
            assert isinstance(wire, Wire)
            self.auto, self._first = wire, wire.strategy
        elif plan is not None:
            thinwire.attach(ddp, plan)
        elif method is not None:
            thinwire.attach(ddp, method.codec)

    def step(self, step: int) -> None:
        task = self.task
        for group in self.optimizer.param_groups:
            group["lr"] = self.factor * task.recipe.rate_at(step)
        self.optimizer.zero_grad()
        loss = task.loss(self.module, task.batch(self.seed, step, self.rank, self.world))
        loss.backward()  # type: ignore[no-untyped-call]
        if task.recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), task.recipe.clip)
        self.optimizer.step()

    @property
    def planned(self) -> bool:
        """Whether `auto` has adopted a plan, or started with one."""
        return self.auto is not None and (self.auto.strategy is not self._first or self.auto.strategy.plan is not None)

    def evaluate(self) -> float:
        """Evaluate on every rank; returns the value of rank 0."""
        with contextlib.nullcontext() if self.updates is None else self.updates.at("settled"):
            value = self.task.evaluate(self.model)[1]
        agreed = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(agreed, 0)
        return float(agreed)


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = load(options.workload, Path(options.data), **options.recipe)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "eth0")
    dist.barrier()
    begun = time.perf_counter()
    job = Job(task, options.method, options.seed)
    dist.barrier()
    setup = time.perf_counter() - begun
    seconds, value, step, reached, sent_bytes = 0.0, 0.0, 0, False, 0
    planning: float | None = None
    while step < task.recipe.steps and not reached:
        dist.barrier()
        before, begun = sent(interface)[0], time.perf_counter()
        for _ in range(min(options.every, task.recipe.steps - step)):
            job.step(step)
            step += 1
            if planning is None and job.planned:
                planning = seconds + time.perf_counter() - begun
        dist.barrier()
        seconds += time.perf_counter() - begun
        sent_bytes += sent(interface)[0] - before
        value = job.evaluate()
        reached = task.better(value, options.target)
    if dist.get_rank() == 0:
        elements = sum(parameter.numel() for parameter in job.model.parameters())
        row = {
            "workload": task.name,
            "method": options.method,
            "workers": dist.get_world_size(),
            "seed": options.seed,
            "metric": task.metric,
            "value": value,
            "steps": step,
            "bytes_per_rank": sent_bytes / step,
            "counted_by": "interface",
            "compression_rate": traffic.dense(elements, job.world) * step / sent_bytes if sent_bytes else None,
            "seconds": seconds,
            "setup_seconds": setup,
            "planning_seconds": planning,
            "seconds_to_target": setup + seconds if reached else None,
        }
        print(json.dumps(row), flush=True)
    hard_exit()


if __name__ == "__main__":
    main()
