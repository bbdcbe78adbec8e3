"""Predicted and measured step times of random plans, for `thinwire bench predict`.

At every rate a job profiles itself in the emulated cluster before the plans run in it, so that predictions do not depend on
measurements of the plans. All plans run in the same processes and take turns, round by round.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from ..planner.plan import VERSION, Plan, PlanGroup, PlanTensor
from ..planner.predict import predict
from ..planner.profile import Profile
from .cluster import Cluster
from .job_stream import Watcher, calibrate, follow, worker
from .netns import LabError, format_rate, parse_rate
from .workloads import load

DRAWN = 300
"""Number of random plans to choose from."""


@dataclass(frozen=True)
class Options:
    workload: str = "gpt"
    nodes: int = 2
    rates: tuple[str, ...] = ("1gbit", "100mbit")
    plans: int = 20
    seed: int = 0
    rounds: int = 3
    steps_per_round: int = 2
    warm_up: int = 8
    budget: float = 40.0


@dataclass
class Phase:
    """The results of the job at one rate; `seconds` by plan."""

    rate: str
    calibrated: bool
    pinned: bool = False
    profile: Profile | None = None
    plans: list[Plan] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class Run:
    """The results of one cluster."""

    options: Options
    phases: list[Phase] = field(default_factory=list)


# -- plans -----------------------------------------------------------------------------------------------------------------


def draw_plan(profile: Profile, generator: random.Random) -> Plan:
    """Groups cut at random places, each with a random codec out of a random subset."""
    tensors = profile.tensors
    groups = generator.randint(1, 12)
    total, edges = sum(tensor.elements for tensor in tensors), []
    for _ in range(groups - 1):
        target, passed = generator.random() * total, 0
        for place, tensor in enumerate(tensors):
            passed += tensor.elements
            if passed >= target:
                edges.append(place + 1)
                break
    cuts = sorted({0, len(tensors), *edges})
    known = [cost.codec if not cost.chain else f"{cost.codec} via {cost.chain}" for cost in profile.codecs]
    menu = generator.sample(known, generator.randint(1, min(4, len(known))))
    parts = []
    for first, last in itertools.pairwise(cuts):
        codec, _, chain = generator.choice(menu).partition(" via ")
        parts.append(PlanGroup(tuple(tensor.name for tensor in tensors[first:last]), codec, chain))
    described = tuple(PlanTensor(tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
    empty = Plan(
        VERSION, profile.fingerprint, profile.model, profile.cluster, "fast", "random", 0.0, 0.0, 0.0, described, ()
    )
    return msgspec.structs.replace(empty, groups=tuple(parts))


def choose_plans(profile: Profile, count: int, seed: int) -> list[Plan]:
    """Random plans with predictions spread evenly between the fastest and the slowest."""
    generator = random.Random(seed)
    drawn = [draw_plan(profile, generator) for _ in range(max(DRAWN, count))]
    times = [math.log(predict(profile, plan.groups).seconds) for plan in drawn]
    chosen: list[int] = []
    for turn in range(count):
        target = min(times) + turn / (count - 1) * (max(times) - min(times))
        free = [place for place in range(len(drawn)) if place not in chosen]
        chosen.append(min(free, key=lambda place: abs(times[place] - target)))
    return [drawn[place] for place in chosen]


def describe(plan: Plan) -> str:
    """One line about a plan: its groups by codec."""
    counts = Counter(group.codec for group in plan.groups)
    return f"{len(plan.groups)} groups: " + ", ".join(f"{count} {codec}" for codec, count in counts.items())


# -- the run ---------------------------------------------------------------------------------------------------------------


def check(options: Options) -> None:
    for rate in options.rates:
        parse_rate(rate)
    if options.plans < 2:
        raise LabError("a comparison needs at least two plans")
    load(options.workload)


def total_visits(options: Options) -> int:
    return options.plans * len(options.rates) * (1 + options.rounds)


def run(options: Options, watcher: Watcher) -> Run:
    """Run a job at every rate on one cluster."""
    with Cluster(options.nodes, 1, "none") as cluster:
        if cluster.mode == "loopback":
            raise LabError(f"predictions need shaped links, which are not available here: {cluster.why}")
        outcome = Run(options)
        for rate in options.rates:
            outcome.phases.append(_shape(cluster, rate, watcher))
            _run_job(cluster, options, outcome.phases[-1], watcher)
        return outcome


def _run_job(cluster: Cluster, options: Options, phase: Phase, watcher: Watcher) -> None:
    def hear(rank: int, item: dict[str, Any]) -> None:
        if "profile" in item:
            phase.profile = msgspec.json.decode(item["profile"], type=Profile)
            watcher.tell(f"profile at {phase.rate} taken")
        elif "plan" in item:
            phase.plans.append(msgspec.json.decode(item["text"], type=Plan))
        elif "warm" in item:
            watcher.advance(1)
        elif "seconds" in item:
            phase.seconds.setdefault(item["run"], []).extend(item["seconds"])
            watcher.advance(1)

    phase.pinned = follow(cluster, worker("predict_worker", {**asdict(options), "rates": [phase.rate]}), hear)


def _shape(cluster: Cluster, rate: str, watcher: Watcher) -> Phase:
    cluster.set_rate(rate)
    return Phase(format_rate(parse_rate(rate)), calibrate(cluster, watcher).good)


# -- statistics ------------------------------------------------------------------------------------------------------------


def rows(run: Run) -> list[dict[str, Any]]:
    found = []
    for phase in run.phases:
        for place, plan in enumerate(phase.plans):
            seconds = phase.seconds.get(place)
            if not seconds or phase.profile is None:
                continue
            predicted = predict(phase.profile, plan.groups).seconds
            measured = statistics.median(seconds)
            found.append(
                {
                    "workload": run.options.workload,
                    "nodes": run.options.nodes,
                    "rate": phase.rate,
                    "plan": place,
                    "predicted_seconds": predicted,
                    "measured_seconds": measured,
                    "error": predicted / measured - 1.0,
                    "samples": len(seconds),
                    "groups": len(plan.groups),
                    "description": describe(plan),
                    "pinned": phase.pinned,
                    "calibrated": phase.calibrated,
                }
            )
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all rows, and by workload and rate: mean absolute error, rank correlation, span of the predictions."""
    result = _summary(rows)
    parts = sorted({(row["workload"], row["rate"]) for row in rows})
    for workload, rate in parts:
        chosen = [row for row in rows if (row["workload"], row["rate"]) == (workload, rate)]
        result |= {f"{name} ({workload}, {rate})": value for name, value in _summary(chosen).items()}
    return result


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    predicted = [row["predicted_seconds"] for row in rows]
    measured = [row["measured_seconds"] for row in rows]
    return {
        "plans": len(rows),
        "mean_absolute_error": statistics.mean(abs(row["error"]) for row in rows),
        "rank_correlation": rank_correlation(predicted, measured),
        "span": max(predicted) / min(predicted),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 if one of the sequences is constant."""
    a, b = _ranks(first), _ranks(second)
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(a, b)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks in ascending order; ties get their mean rank."""
    ordered = sorted(values)
    return [statistics.mean(place for place, other in enumerate(ordered) if other == value) for value in values]
