"""One rank of a job whose links change while it runs: trains with `auto`, and says at the end what became of it.

Arguments: the workload, how many steps, the steps at which to say so, and what a hook must save in the first decision.
"""

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


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, steps, said, least = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4])
    work, rank = load(name), dist.get_rank()
    ddp = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    usual, auto.LEAST_GAIN = auto.LEAST_GAIN, least
    wire = thinwire.attach(ddp, plan_file="")
    assert isinstance(wire, AutoWire)
    for step in range(steps):
        optimizer.zero_grad()
        work.loss(ddp, work.batch(step, rank)).backward()
        optimizer.step()
        if len(wire.decisions) > 1:
            auto.LEAST_GAIN = usual
        if rank == 0 and step in said:
            print(json.dumps({"step": step}), flush=True)
    left = wire.runner.members[0].left() if wire.runner is not None else {}
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in left.values())
    decisions = [[decision.step, decision.text] for decision in wire.decisions]
    print(json.dumps({"rank": rank, "digest": digest(ddp), "finite": finite, "decisions": decisions}), flush=True)
    leave()


if __name__ == "__main__":
    main()
