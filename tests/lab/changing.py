"""One rank of a job whose links change while it runs: trains with `auto`, and says at the end what became of it."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.models import digest
from thinwire.frontends import auto
from thinwire.frontends.auto import AutoWire
from thinwire.lab.farewell import leave
from thinwire.lab.workloads import load

STEPS, DROP, RAISE = 250, 60, 170  # the first decisions may take 44 steps


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, rank = load(sys.argv[1]), dist.get_rank()
    ddp = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    auto.LEAST_GAIN = 0.5  # on the fast link DDP stays alone, however crowded the machine is
    wire = thinwire.attach(ddp, plan_file="")
    assert isinstance(wire, AutoWire)
    for step in range(STEPS):
        optimizer.zero_grad()
        work.loss(ddp, work.batch(step, rank)).backward()
        optimizer.step()
        if rank == 0 and step in (DROP, RAISE):
            print(json.dumps({"step": step}), flush=True)
    left = wire.runner.members[0].left() if wire.runner is not None else {}
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in left.values())
    decisions = [[decision.step, decision.text] for decision in wire.decisions]
    print(json.dumps({"rank": rank, "digest": digest(ddp), "finite": finite, "decisions": decisions}), flush=True)
    leave()


if __name__ == "__main__":
    main()
