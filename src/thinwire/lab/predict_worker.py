"""A rank of `thinwire bench predict`: profiles a job, then runs random plans. Rank 0 prints results as JSON lines."""

from __future__ import annotations

import argparse
import gc
import os

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..auto.profiling import WATCHED, Profiling
from ..ddp.wrap import wrap
from ..engine.wire import Wire
from ..planner.profile import Profile
from .bench_predict import choose_plans
from .hard_exit import hard_exit
from .step_worker import MethodRun, Visitor, say
from .workloads import Workload, load


def profile(work: Workload, visitor: Visitor, ddp: DistributedDataParallel, rate: str, budget: float) -> Profile:
    """Observe a few steps of plain DDP, then measure."""
    run = MethodRun(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), None)
    profiling = Profiling(ddp)
    visitor.visit(run, WATCHED)
    found = profiling.measure(budget=budget, model=work.name, rate=rate)
    profiling.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--rate", required=True, help="for the profile's own record")
    parser.add_argument("--plans", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a visit")
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds for the measurements of a profile")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = load(options.workload)
    visitor = Visitor(work, [], os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    native = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)

    visitor.visit(MethodRun(native, torch.optim.SGD(native.parameters(), lr=0.01), None), 3)
    found = profile(work, visitor, native, options.rate, options.budget)
    say(profile=msgspec.json.encode(found).decode())
    runs = []
    for place, plan in enumerate(choose_plans(found, options.plans, options.seed)):
        say(plan=place, text=msgspec.json.encode(plan).decode())
        ddp, wire = wrap(work.model(), plan, gradient_as_bucket_view=True)
        assert isinstance(wire, Wire)
        runs.append(MethodRun(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), wire))
        visitor.visit(runs[-1], options.warm_up)
        say(warm=place)
    gc.collect()
    gc.freeze()
    for round_ in range(options.rounds):
        for place, run in enumerate(runs):
            said = visitor.visit(run, options.steps)
            say(round=round_, run=place, seconds=said["seconds"])
    hard_exit()


if __name__ == "__main__":
    main()
