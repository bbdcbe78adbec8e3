"""Auto beside endless loops that start and stop at random: `python -m tests.stress_auto`. Minutes; not part of the suite.

A small GPT trains by plain DDP and by auto, in turns, at 1 Gbit/s and without shaping. Printed are the median of the paired
ratios of the time after auto's last pause (the same steps of both), what auto's pauses took in all, and whether a plan was
adopted whose prediction was outside of computation and DDP alone. It exits with 1 where one of them is too much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.auto.record import busy
from thinwire.lab import Cluster

ROOT = Path(__file__).parents[1]
MOST, PAUSES, PERCENT = 1.10, 2.0, 1.001


def job() -> None:
    """One rank of a job: "plain" or "auto", and the number of steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    from thinwire.ddp.wire import DDPWire
    from thinwire.lab.hard_exit import hard_exit
    from thinwire.lab.workloads import load

    method, steps = sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, rank = load("gpt-small"), dist.get_rank()
    ddp = DistributedDataParallel(work.model(), bucket_cap_mb=4)
    wire = thinwire.attach(ddp, plan_file="") if method == "auto" else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    adopted: list[tuple[float, float, float]] = []
    ends, before = [], None
    for step in range(steps):
        optimizer.zero_grad()
        work.loss(ddp, work.batch(step, rank)).backward()
        optimizer.step()
        ends.append(time.perf_counter())
        plan = wire.strategy.plan if wire is not None else None
        if plan is not None and plan is not before:
            adopted.append((plan.bound_seconds, plan.predicted_seconds, plan.dense_seconds))
        before = plan
    if rank == 0:
        found: dict[str, Any] = {"ends": ends, "adopted": adopted}
        if isinstance(wire, DDPWire) and wire.tuner is not None:
            found |= {"pauses": vars(wire.tuner.pauses), "words": wire.explain()}
        print(json.dumps(found), flush=True)
    dist.barrier()
    hard_exit()


def train(rate: str | None, method: str, steps: int) -> dict[str, Any]:
    lines: list[str] = []
    with Cluster(2, rate=rate) as cluster:
        code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'src')]!r}; "
        code += f"sys.argv = ['', 'job', '{method}', '{steps}']; from tests.stress_auto import job; job()"
        result = cluster.run([sys.executable, "-c", code], on_line=lambda rank, line: lines.append(line))
    assert result.code == 0, lines
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return found


def pair(rate: str | None, steps: int, auto_first: bool) -> tuple[float, dict[str, Any]]:
    """Time of auto relative to plain DDP, of the steps after auto's last pause."""
    order = ("auto", "plain") if auto_first else ("plain", "auto")
    found = {method: train(rate, method, steps) for method in order}
    first = min(found["auto"]["pauses"]["last_step"], steps - 2)
    seconds = {method: found[method]["ends"][-1] - found[method]["ends"][first] for method in order}
    return seconds["auto"] / seconds["plain"], found["auto"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default="2,4,8")
    parser.add_argument("--rates", default="1gbit,none")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--words", action="store_true", help="print what auto decided")
    options = parser.parse_args()
    passed = True
    for loops in (int(word) for word in options.loops.split(",")):
        for rate in (None if word == "none" else word for word in options.rates.split(",")):
            ratios, pauses, outside = list[float](), list[float](), 0
            for number in range(options.pairs):
                with busy(loops, seconds=3600.0):
                    ratio, auto = pair(rate, options.steps, auto_first=number % 2 == 1)
                ratios.append(ratio)
                pauses.append(auto["pauses"]["total"])
                outside += sum(
                    not low / PERCENT <= predicted <= high * PERCENT for low, predicted, high in auto["adopted"]
                )
                if options.words:
                    print(auto["words"], flush=True)
            middle = statistics.median(ratios)
            passed &= middle <= MOST and max(pauses) <= PAUSES and not outside
            print(
                f"{loops} loops, {rate or 'not shaped'}: {middle:.3f} of plain DDP after the last pause "
                f"({', '.join(f'{ratio:.3f}' for ratio in ratios)}; at most {MOST}), pauses {max(pauses):.2f} s "
                f"(at most {PAUSES:g}), {outside} plans outside of the bounds",
                flush=True,
            )
    return 0 if passed else 1


if __name__ == "__main__":
    job() if sys.argv[1:2] == ["job"] else sys.exit(main())
