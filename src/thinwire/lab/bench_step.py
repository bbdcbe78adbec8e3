"""Step times of all methods on the same emulated cluster, for `thinwire bench step`.

All methods run in the same processes and take turns, round by round, so that noise affects all alike. A step is forward,
backward and optimizer; the slowest rank counts. Bytes are read from the interface counters of the nodes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..chains.chain import choose
from ..errors import ThinwireError
from . import workloads
from .cluster import Cluster
from .job_stream import Watcher, calibrate, follow, worker
from .method_spec import EXAMPLE, parse_updates
from .netns import LabError, format_rate, parse_rate
from .plots import figure

PACKET_OVERHEAD = 66  # Ethernet 14, IPv4 20, TCP 20, TCP timestamps 12
Item = TypeVar("Item")
CEILING, BASE, SILENT, AUTO = "none", "fp32", "noop", "auto"
PEER_NAMES = ("noop", "fp16", "bf16", "powersgd1", "powersgd4", "int8-hook", "topk-hook")

METHODS = (
    "none",
    "noop",
    "fp32",
    "fp16",
    "bf16",
    "powersgd1",
    "powersgd4",
    "int8-hook",
    "topk-hook",
    "auto",
    "micro(density=0.01)",
    "laplace(density=0.01)",
    "adacomp",
    "randomblock",
    "cast",
    "dense",
    "updates(randomblock(ratio=64), 0.3)",
    "updates(randomblock(ratio=64), 0.3, period=8)",
)


@dataclass(frozen=True)
class Options:
    workload: str = "gpt"
    ranks_per_node: int = 1
    rates: tuple[str, ...] = ("100mbit", "1gbit", "none")
    methods: tuple[str, ...] = METHODS
    rounds: int = 10
    steps_per_round: int = 3
    warm_up: int = 60
    bucket_mb: float | None = None
    bucket_view: bool = True
    """Gradients are views of DDP's buckets, which saves a copy."""
    momentum: float = 0.0
    """Momentum of the SGD optimizer of every method."""


@dataclass
class Visit:
    """The measurements of a visit to a method; see `step_worker.Visitor.visit`."""

    round: int
    seconds: list[float]
    cpu_seconds: float
    bytes_sent: float
    packets_sent: float
    wire_steps: float
    handed_bytes: float
    traffic_bytes: float


@dataclass
class Phase:
    """All visits at one rate."""

    nodes: int
    rate: str
    measured_rate: float | None
    calibrated: bool
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    explained: dict[str, str] = field(default_factory=dict)
    """Explanations of methods that choose their codec themselves."""


@dataclass
class Run:
    """The results of one cluster."""

    nodes: int
    pinned: bool
    counted: bool
    """Whether every node has its own network interface, with meaningful counters."""
    peak_memory_bytes: int = 0
    phases: list[Phase] = field(default_factory=list)


def split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def name_and_size(method: str) -> tuple[str, str]:
    """The parts before and after the last `@`; chains may contain others (`comp@cpu`)."""
    name, _, size = method.rpartition("@")
    return (name, size) if name and not size.startswith("cpu") else (method, "")


def sizes_of(text: str) -> list[float]:
    """Sizes of DDP's buckets in MB, in the order in which they become ready; the last applies to all further ones."""
    return [float(size) for size in text.split("/")]


def check(options: Options) -> None:
    """Raise `LabError` for options that no worker could run, before a cluster is created."""
    workloads.check(options.workload)
    for rate in options.rates:
        parse_rate(rate)
    if len(set(options.methods)) != len(options.methods):
        raise LabError("a method is given twice")
    for method in options.methods:
        name, size = name_and_size(method)
        try:
            if size and min(sizes_of(size)) <= 0:
                raise ValueError
        except ValueError:
            raise LabError(
                f"{method!r}: what follows the @ is the size of DDP's buckets in MB, as in 'fp32@4', or that of each in turn, "
                "as in 'fp32@1/25/8'"
            ) from None
        if name not in (CEILING, BASE, AUTO, *PEER_NAMES) and parse_updates(name) is None:
            try:
                choose(name)
            except ThinwireError as error:
                names = ", ".join((CEILING, BASE, AUTO, *PEER_NAMES))
                raise LabError(f"{error}; or one of the methods {names}, {EXAMPLE}") from None


def total_visits(options: Options, clusters: int = 1) -> int:
    return clusters * len(options.methods) * len(options.rates) * (1 + options.rounds)


def run(nodes: int, options: Options, watcher: Watcher) -> Run:
    """All rates and methods on one cluster of `nodes` nodes.

    Every rate has a separate job, started when the links are shaped: a connection that is older goes on building packets
    for the rate it was made at, which the shaper must cut up, and that costs a dense method the most CPU time.
    """
    with Cluster(nodes, options.ranks_per_node, "none") as cluster:
        if cluster.why:
            watcher.tell(f"not shaped: {cluster.why}")
        outcome = Run(nodes, pinned=False, counted=cluster.mode != "loopback")
        for rate in options.rates:
            outcome.phases.append(_shape(cluster, rate, watcher))
            _run_job(cluster, options, outcome, watcher)
        return outcome


def _run_job(cluster: Cluster, options: Options, outcome: Run, watcher: Watcher) -> None:
    """Run all methods at the current rate."""
    phase = outcome.phases[-1]

    def hear(rank: int, item: dict[str, Any]) -> None:
        if "warm" in item:
            watcher.advance(1)
        elif "seconds" in item:
            phase.visits.setdefault(options.methods[item.pop("method")], []).append(Visit(**item))
            watcher.advance(1)
        elif "explained" in item:
            phase.explained[options.methods[item["method"]]] = item["explained"]
        elif "peak_memory_bytes" in item:
            outcome.peak_memory_bytes = max(outcome.peak_memory_bytes, item["peak_memory_bytes"])

    outcome.pinned = follow(cluster, worker("step_worker", asdict(options)), hear)


def _shape(cluster: Cluster, rate: str, watcher: Watcher) -> Phase:
    if cluster.mode == "loopback":
        return Phase(cluster.nodes, rate, None, False)
    cluster.set_rate(rate)
    calibration = calibrate(cluster, watcher)
    return Phase(cluster.nodes, format_rate(parse_rate(rate)), calibration.measured, calibration.good)


# Statistics.


def rows(run: Run, options: Options) -> list[dict[str, Any]]:
    """One flat row per rate and method, in the order given."""
    return [
        _row(run, phase, method, options)
        for phase in run.phases
        for method in options.methods
        if phase.visits.get(method)
    ]


def _row(run: Run, phase: Phase, method: str, options: Options) -> dict[str, Any]:
    visits = phase.visits[method]
    seconds = _median(visits)
    low, high = interval([visit.seconds for visit in visits])
    ceiling = _median(phase.visits.get(CEILING, []))
    base = _median(phase.visits.get(BASE, []))
    cost = base - ceiling if base and ceiling else None
    stats, expected = _handed_over(visits)
    payload = _payload(visits, phase.visits.get(SILENT, []), options) if run.counted else None
    against_base = ratio_interval(visits, phase.visits.get(BASE, []))
    return {
        "workload": options.workload,
        "nodes": run.nodes,
        "ranks_per_node": options.ranks_per_node,
        "rate": phase.rate,
        "method": method,
        "seconds": seconds,
        "mean_seconds": statistics.mean(value for visit in visits for value in visit.seconds),
        "ci_low": low,
        "ci_high": high,
        "ratio_to_ceiling": seconds / ceiling if ceiling else None,
        "ratio_to_fp32": seconds / base if base else None,
        "ratio_to_fp32_low": against_base and against_base[0],
        "ratio_to_fp32_high": against_base and against_base[1],
        "recovered": (base - seconds) / cost if base and cost and method != CEILING else None,
        "bytes_per_rank": _each_step(visits, "bytes_sent", options) / options.ranks_per_node if run.counted else None,
        "payload_bytes_per_rank": payload,
        "stats_bytes_per_rank": stats,
        "expected_bytes_per_rank": expected,
        "payload_ratio_to_expected": payload / expected if payload and expected else None,
        "cpu_seconds": statistics.median(visit.cpu_seconds for visit in visits),
        "samples": sum(len(visit.seconds) for visit in visits),
        "pinned": run.pinned,
        "measured_rate": phase.measured_rate,
        "calibrated": phase.calibrated,
        "explained": phase.explained.get(method),
    }


def _median(visits: Sequence[Visit]) -> float:
    """Median of all steps; 0 if there are none."""
    seconds = [value for visit in visits for value in visit.seconds]
    return statistics.median(seconds) if seconds else 0.0


def _each_step(visits: Sequence[Visit], name: str, options: Options) -> float:
    """Mean per step of a node's counter. Not the median, because message sizes vary."""
    values = [getattr(visit, name) / options.steps_per_round for visit in visits]
    return statistics.mean(values) if values else 0.0


def _payload(visits: Sequence[Visit], silent: Sequence[Visit], options: Options) -> float | None:
    """Gradient bytes per rank and step: without packet headers and without the traffic of a hook that sends nothing."""
    if not silent:
        return None
    total = 0.0
    for sign, which in ((1, visits), (-1, silent)):
        sent = _each_step(which, "bytes_sent", options)
        total += sign * (sent - PACKET_OVERHEAD * _each_step(which, "packets_sent", options))
    return total / options.ranks_per_node


def _handed_over(visits: Sequence[Visit]) -> tuple[float | None, float | None]:
    """Bytes per step passed to collectives by a rank, and their expected traffic; see `Collective.traffic`."""
    steps = sum(visit.wire_steps for visit in visits)
    if not steps:
        return None, None
    return sum(visit.handed_bytes for visit in visits) / steps, sum(visit.traffic_bytes for visit in visits) / steps


def interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % confidence interval of the median: bootstrap over rounds, since steps of a visit are correlated."""
    return _bootstrap(rounds, lambda drawn: statistics.median(value for seconds in drawn for value in seconds))


def ratio_interval(visits: Sequence[Visit], others: Sequence[Visit]) -> tuple[float, float] | None:
    """95 % confidence interval of the ratio of two medians: paired bootstrap over rounds."""
    first, second = ({visit.round: visit.seconds for visit in each} for each in (visits, others))

    def ratio(drawn: Sequence[int]) -> float:
        own, base = (statistics.median(value for at in drawn for value in each[at]) for each in (first, second))
        return own / base

    common = sorted(first.keys() & second.keys())
    return _bootstrap(common, ratio) if common else None


def _bootstrap(items: Sequence[Item], statistic: Callable[[Sequence[Item]], float]) -> tuple[float, float]:
    generator, samples = random.Random(0), 2000
    found = sorted(statistic(generator.choices(items, k=len(items))) for _ in range(samples))
    return found[int(0.025 * samples)], found[int(0.975 * samples)]


def plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Step time over rate, one line per method."""
    rates = sorted({row["rate"] for row in rows}, key=lambda rate: parse_rate(rate) or float("inf"))
    with figure(path, 9, 5.5) as drawn:
        axes = drawn.subplots()
        for method in dict.fromkeys(row["method"] for row in rows):
            points = {row["rate"]: row["seconds"] for row in rows if row["method"] == method}
            axes.plot([rates.index(rate) for rate in points], list(points.values()), marker="o", label=method)
        axes.set_xticks(range(len(rates)), rates)
        axes.set(xlabel="rate of the links", ylabel="seconds per step", yscale="log")
        axes.legend(fontsize="small", ncols=2)
