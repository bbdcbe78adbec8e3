"""A rank of a training job on the emulated cluster: `python -m thinwire.lab.train --method fp32|CODEC --steps N`.

Plain DDP and one line for thinwire. Rank 0 prints progress as JSON lines on standard output.
"""

import argparse
import json
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire

from ..ddp.wire import DDPWire
from .hard_exit import hard_exit
from .workloads import load

TRACED = 20
"""Number of steps in the middle of the run to trace for the report."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="gpt-small")
    parser.add_argument("--data", default=None)
    parser.add_argument(
        "--method", default="fp32", help="fp32 for plain DDP, auto, or a codec such as 'micro(density=0.01)'"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--log", default=None, help="a folder for the journals of thinwire's runs")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    work = load(options.workload, data=options.data)
    ddp = DistributedDataParallel(work.model(), bucket_cap_mb=4)
    wire = None if options.method == "fp32" else thinwire.attach(ddp, options.method, plan_file="")
    if wire is not None and options.log is not None:
        wire.log_to(options.log, summary=0, residual_every=5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=options.lr)
    for step in range(options.steps):
        if wire is not None and options.log is not None and step == options.steps // 2:
            wire.trace(min(TRACED, options.steps - step))
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = work.loss(ddp, work.batch(step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        mean = loss.detach().clone()
        seconds = time.perf_counter() - begun
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if wire is not None:
            wire.note(loss=mean.item())
        if rank == 0:
            print(json.dumps({"step": step, "loss": mean.item(), "seconds": seconds}), flush=True)
    if rank == 0 and wire is not None:
        stats = wire.stats()
        numbers = {key: stats.get(key) for key in ("steps", "bytes_per_step", "link_bytes_per_step", "residual_norm")}
        if isinstance(wire, DDPWire) and wire.tuner is not None:
            numbers["explained"] = wire.explain()
        print(json.dumps({"stats": numbers}), flush=True)
    if wire is not None:
        wire.close()
    hard_exit()


if __name__ == "__main__":
    main()
