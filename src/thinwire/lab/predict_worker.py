"""One rank of `thinwire bench predict`: profiles a job at several rates, then runs random plans of it at each.

Before every phase rank 0 says `{"ready": i}` and waits for the file `go-i`: the one who started it changes the links. Phases:
one for the profile at each rate, one without shaping in which all plans warm up, one for the steps at each rate.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..frontends.profile import WATCHED, Profiling
from ..frontends.wrap import wrap
from ..planner.profile import Profile
from .bench_predict import choose_plans
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
    parser.add_argument("--rates", required=True, help="a JSON list; for the profiles' own record")
    parser.add_argument("--plans", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a visit")
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds for the measurements of a profile")
    parser.add_argument("--flags", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, rates = load(options.workload), json.loads(options.rates)
    judge = Judge(work, [], os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    native = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)

    def phase(number: int) -> None:
        judge.barrier()
        say(ready=number)
        while dist.get_rank() == 0 and not (options.flags / f"go-{number}").exists():
            time.sleep(0.02)
        judge.barrier()

    judge.visit(Contestant(native, torch.optim.SGD(native.parameters(), lr=0.01), None), 3)
    profiles = []
    for number, rate in enumerate(rates):
        phase(number)
        profiles.append(profile(work, judge, native, rate, options.budget))
        say(profile=number, text=msgspec.json.encode(profiles[-1]).decode())
    plans = choose_plans(profiles, options.plans, options.seed)
    phase(len(rates))
    contestants = []
    for place, plan in enumerate(plans):
        say(plan=place, text=msgspec.json.encode(plan).decode())
        ddp, wire = wrap(work.model(), plan, gradient_as_bucket_view=True)
        contestants.append(Contestant(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), wire))
        judge.visit(contestants[-1], options.warm_up)
        say(warm=place)
    gc.collect()
    gc.freeze()
    for number in range(len(rates)):
        phase(len(rates) + 1 + number)
        for round_ in range(options.rounds):
            for place, contestant in enumerate(contestants):
                found = judge.visit(contestant, options.steps)
                say(rate=number, round=round_, contestant=place, seconds=found["seconds"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
