"""One rank of `thinwire bench predict`: profiles a job, then runs random plans of it. Rank 0 prints what it finds as JSON."""

from __future__ import annotations

import argparse
import gc
import os

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..frontends.profile import WATCHED, Profiling
from ..frontends.wrap import wrap
from ..planner.profile import Profile
from .bench_predict import choose_plans
from .farewell import leave
from .step_worker import Contestant, Judge, say
from .workloads import Workload, load


def profile(work: Workload, judge: Judge, ddp: DistributedDataParallel, rate: str, budget: float) -> Profile:
    """Some steps of plain DDP, watched, and the measurements after them."""
    contestant = Contestant(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), None)
    profiling = Profiling(ddp)
    judge.visit(contestant, WATCHED)
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
    judge = Judge(work, [], os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    native = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)

    judge.visit(Contestant(native, torch.optim.SGD(native.parameters(), lr=0.01), None), 3)
    found = profile(work, judge, native, options.rate, options.budget)
    say(profile=msgspec.json.encode(found).decode())
    contestants = []
    for place, plan in enumerate(choose_plans(found, options.plans, options.seed)):
        say(plan=place, text=msgspec.json.encode(plan).decode())
        ddp, wire = wrap(work.model(), plan, gradient_as_bucket_view=True)
        contestants.append(Contestant(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), wire))
        judge.visit(contestants[-1], options.warm_up)
        say(warm=place)
    gc.collect()
    gc.freeze()
    for round_ in range(options.rounds):
        for place, contestant in enumerate(contestants):
            said = judge.visit(contestant, options.steps)
            say(round=round_, contestant=place, seconds=said["seconds"])
    leave()


if __name__ == "__main__":
    main()
