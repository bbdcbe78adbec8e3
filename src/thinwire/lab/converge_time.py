"""Time to accuracy over emulated links, with real processes and DDP: `thinwire bench converge --rate 100mbit --target 0.97`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..planner.plan import Plan
from .bench_step import AUTO, BASE, PEER_NAMES
from .cluster import Cluster
from .contest import Method
from .converge import Unfinished, read
from .netns import LabError, format_rate, parse_rate
from .tasks import load

EVERY = 20
"""Steps between two looks at the test data; the clock stands still meanwhile."""
PLAN = ".json"
"""How the name of a file ends that holds a plan."""


def is_auto(text: str) -> bool:
    """`auto` plans from scratch; `auto@FILE.json` begins with the plan in that file, or leaves one there."""
    return text == AUTO or (text.startswith(f"{AUTO}@") and text.endswith(PLAN))


@dataclass(frozen=True)
class Options:
    workload: str
    methods: tuple[str, ...]
    data: Path
    rate: str
    target: float
    nodes: int = 2
    seeds: int = 1
    recipe: dict[str, Any] = field(default_factory=dict)
    results: Path = Path("results")
    end: float = math.inf
    """When to start no further run, by `time.monotonic`."""

    def file(self, method: str, seed: int) -> Path:
        """Where a run is kept."""
        plain = method in (AUTO, BASE, *PEER_NAMES) or method.endswith(PLAN)
        facts = [self.workload, method if plain else Method.parse(method).full(), seed, self.rate, self.target]
        facts += [self.nodes, EVERY, sorted(self.recipe.items())]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-")[:60]
        return self.results / f"{self.workload}-{self.nodes}n-{self.rate}-{words}-s{seed}-{digest}.json"


def check(options: Options) -> None:
    """Refuse what no rank could run, before there is a cluster."""
    parse_rate(options.rate)
    if len(set(options.methods)) != len(options.methods):
        raise LabError("a method is given twice")
    for text in options.methods:
        if is_auto(text):
            continue
        if text.endswith(PLAN):
            Plan.load(text)
        elif text not in (BASE, *PEER_NAMES):
            Method.parse(text)
    task = load(options.workload, options.data, **options.recipe)
    if task.metric == "accuracy" and not 0.0 < options.target < 1.0:
        raise LabError(f"the target is an accuracy, between 0 and 1, as in --target 0.97; not {options.target:g}")
    if task.recipe.batch % options.nodes:
        raise LabError(f"a batch of {task.recipe.batch} cannot be shared by {options.nodes} nodes: see --batch-size")


def run(options: Options, tell: Callable[[str], None], done: Callable[[int], None]) -> list[dict[str, Any]]:
    """One flat row for each seed and method; methods take turns, seed by seed. Complete runs are not repeated."""
    todo = [(seed, method) for seed in range(options.seeds) for method in options.methods]
    rows = [read(options.file(method, seed)) for seed, method in todo]
    done(len(rows) - rows.count(None))
    if None in rows:
        options.results.mkdir(parents=True, exist_ok=True)
        _fill(options, todo, rows, tell, done)
    found = [row["row"] for row in rows if row is not None]
    for row in found:
        row["speedup_over_fp32"] = _speedup(row, found)
    return found


def _fill(
    options: Options,
    todo: list[tuple[int, str]],
    rows: list[dict[str, Any] | None],
    tell: Callable[[str], None],
    done: Callable[[int], None],
) -> None:
    """Run what is missing, on one cluster."""
    with Cluster(options.nodes, 1, options.rate) as cluster:
        measured, good = None, False
        if cluster.mode == "loopback":
            tell(f"not shaped: {cluster.why}")
        else:
            calibration = cluster.calibrate()
            measured, good = calibration.measured, calibration.good
            tell(f"{options.nodes} nodes, {calibration}")
            if not good:
                tell("the links are not within 15 % of the rate: take times with care")
        place = {
            "rate": format_rate(parse_rate(options.rate)),
            "measured_rate": measured,
            "calibrated": good,
            "target": options.target,
        }
        for i, (seed, method) in enumerate(todo):
            if rows[i] is not None:
                continue
            if time.monotonic() > options.end:
                raise Unfinished(f"the time is over before {method}, seed {seed}: the same command goes on")
            row = {**_one(cluster, options, method, seed), **place}
            rows[i] = {"spec": {"method": method, "seed": seed, "recipe": options.recipe}, "row": row}
            options.file(method, seed).write_text(json.dumps(rows[i]) + "\n")
            done(1)


def _one(cluster: Cluster, options: Options, method: str, seed: int) -> dict[str, Any]:
    news: dict[str, Any] = {}
    noise: list[str] = []

    def read(rank: int, line: str) -> None:
        try:
            item = json.loads(line)
            if rank == 0 and "value" in item:
                news.update(item)
        except (ValueError, TypeError):
            noise.append(f"[{rank}] {line}")

    words = {
        "--workload": options.workload,
        "--data": options.data.resolve(),
        "--method": method,
        "--seed": seed,
        "--target": options.target,
        "--every": EVERY,
        "--recipe": json.dumps(options.recipe),
    }
    command = [sys.executable, "-m", "thinwire.lab.converge_worker"]
    result = cluster.run([*command, *(str(word) for pair in words.items() for word in pair)], on_line=read)
    if result.code or "value" not in news:
        raise LabError("\n".join([f"the job with {method} ended with code {result.code}:", *noise[-30:]]))
    if cluster.mode == "loopback":
        news["bytes_per_rank"] = news["compression_rate"] = None
    return {**news, "pinned": result.pinned}


def _speedup(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    base = next((other for other in rows if other["method"] == BASE and other["seed"] == row["seed"]), None)
    own = row["seconds_to_target"]
    return base["seconds_to_target"] / own if base and base["seconds_to_target"] and own else None
