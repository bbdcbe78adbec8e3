"""A rank of `thinwire bench predict`: profiles a job, then runs random plans. Rank 0 prints results as JSON lines."""

import gc
import json
import os
import sys

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..auto.profiling import WATCHED, Profiling
from ..ddp.wrap import wrap
from ..engine.wire import Wire
from .bench_predict import Options, choose_plans
from .hard_exit import hard_exit
from .step_worker import MethodRun, Visitor, say
from .workloads import load


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = load(options.workload)
    visitor = Visitor(work, [], os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    native = DistributedDataParallel(work.model(), gradient_as_bucket_view=True)

    plain = MethodRun(native, torch.optim.SGD(native.parameters(), lr=0.01), None)
    visitor.visit(plain, 3)
    profiling = Profiling(native)
    visitor.visit(plain, WATCHED)
    found = profiling.measure(budget=options.budget, model=work.name, rate=options.rates[0])
    profiling.close()
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
            said = visitor.visit(run, options.steps_per_round)
            say(round=round_, run=place, seconds=said["seconds"])
    hard_exit()


if __name__ == "__main__":
    main()
