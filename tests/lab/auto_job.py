"""One rank of a job that trains with `auto`, and says at the end what became of it.

Arguments: the workload, how many steps.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.ddp.reference import Ledger
from tests.models import digest
from thinwire.lab.hard_exit import hard_exit
from thinwire.lab.workloads import load


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, steps = sys.argv[1], int(sys.argv[2])
    work, rank = load(name), dist.get_rank()
    ddp = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    wire = thinwire.attach(ddp, plan_file="")
    assert wire.tuner is not None
    ledger = Ledger(ddp)
    for step in range(steps):
        optimizer.zero_grad()
        work.loss(ddp, work.batch(step, rank)).backward()
        ledger.close_step()
        optimizer.step()
    left = wire.executor.rank_states[0].unsent() if wire.executor is not None else {}
    end = {
        "rank": rank,
        "digest": digest(ddp),
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in left.values()),
        "lost": ledger.balance(wire),
        "hooked": wire.hooked,
        "measured": wire.tuner.job.profile is not None,
        "decisions": [[decision.step, decision.text] for decision in wire.decisions],
        "words": wire.explain(),
    }
    print(json.dumps(end), flush=True)
    hard_exit()


if __name__ == "__main__":
    main()
