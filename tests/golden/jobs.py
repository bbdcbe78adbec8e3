"""What real ranks do for the golden files, over gloo: states that only DDP makes, and a journal."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import thinwire

from . import cases, internals
from .cases import AFTER, BEFORE, FILES

PLAN = FILES / "ranks" / "plan.json"
KINDS = ["early", "micro", "plan", "scaler", "auto", "stream", "dcp"]
"""early: saved before there is a layout. stream: the wire for GPUs, on the CPU. dcp: `torch.distributed.checkpoint`."""

TEXTS = {"early": "topk(density=0.05)", "micro": "micro(density=0.05)", "scaler": "topk(density=0.05, momentum=0.5)"}


def changed(kind: str) -> bool:
    """See `cases.changed`; the plan has a group of `micro`."""
    return kind in ("plan", "auto") or cases.changed(TEXTS.get(kind, ""))


class Job:
    """A module, its wire and its optimizer on this rank. Gradients do not depend on the parameters, so those are not stored."""

    def __init__(self, kind: str, resumed: bool) -> None:
        self.ddp = DistributedDataParallel(cases.Weights(), bucket_cap_mb=0.002)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.125)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6) if kind == "scaler" else None
        self.wire: Any
        if kind == "stream":
            self.wire = internals.stream_wire(self.ddp, "topk(density=0.05)", min_elements=64)
        elif kind == "auto":
            self.wire = thinwire.attach(self.ddp, plan_file="" if resumed else PLAN, min_elements=64)
        else:
            what = thinwire.Plan.load(PLAN) if kind == "plan" else TEXTS.get(kind, "randomblock(ratio=8)")
            self.wire = thinwire.attach(self.ddp, what, scaler=self.scaler, min_elements=64)

    def step(self, step: int) -> str:
        self.optimizer.zero_grad()
        loss = self.ddp(step, dist.get_rank())
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return cases.digest({name: p.grad for name, p in self.ddp.module.named_parameters() if p.grad is not None})

    def steps(self, steps: range) -> list[str]:
        return [self.step(step) for step in steps]


def begin(kind: str) -> int:
    return 1 if kind == "early" else BEFORE


def write(kind: str, folder: str) -> list[str]:
    """Write a checkpoint; what the steps after it gave."""
    job = Job(kind, resumed=False)
    job.steps(range(begin(kind)))
    if kind == "dcp":
        dcp.save({"wire": job.wire}, checkpoint_id=folder)
    else:
        job.wire.save(folder)
    digests = job.steps(range(begin(kind), begin(kind) + AFTER))
    job.wire.close()
    return digests


def resume(kind: str, folder: str, by_dcp: bool) -> tuple[dict[str, Any], list[str]]:
    """The state after it was loaded, and what the steps after it give."""
    job = Job(kind, resumed=True)
    if by_dcp:
        dcp.load({"wire": job.wire}, checkpoint_id=folder)
    else:
        job.wire.load(folder)
    # As arrays: tensors would go through the pipe to the test as handles of shared memory.
    state = {key: value if isinstance(value, str) else value.numpy() for key, value in job.wire.state_dict().items()}
    digests = job.steps(range(begin(kind), begin(kind) + AFTER))
    job.wire.close()
    return state, digests


def log(folder: str) -> None:
    """A job that does everything that a journal has a line for."""
    os.environ["THINWIRE_LOG"] = "error"
    job = Job("plan", resumed=False)
    job.wire.log_to(folder, residual_every=2)
    job.steps(range(3))
    job.wire.trace(2)
    for step in range(3, 7):
        job.step(step)
        job.wire.note(loss=1.0 / (1 + step))
    job.wire.change("topk(density=0.05)")
    job.wire.set(density=0.25)
    job.steps(range(7, 9))
    next(job.ddp.module.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    job.step(9)
    job.wire.close()
