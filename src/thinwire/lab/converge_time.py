"""Time to accuracy over emulated links, with real processes and DDP: `thinwire bench converge --rate 100mbit --target 0.97`."""

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..planner.plan import Plan
from .bench_step import AUTO, BASE, PEER_NAMES
from .cluster import Cluster
from .converge import Unfinished, name_of
from .job_stream import Watcher, calibrate, follow, worker
from .netns import LabError, format_rate, parse_rate
from .run_file import read
from .tasks import load
from .trainers import Method

EVERY = 20
"""Steps between evaluations, which are not timed."""
PLAN = ".json"
"""Suffix of plan files."""


def is_auto(text: str) -> bool:
    """`auto` plans from scratch; `auto@FILE.json` starts with the plan in the file, or saves one there."""
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
    """Time after which no further run starts, by `time.monotonic`."""

    def file(self, method: str, seed: int) -> Path:
        """The result file of a run."""
        plain = method in (AUTO, BASE, *PEER_NAMES) or method.endswith(PLAN)
        facts = [self.workload, method if plain else Method.parse(method).full(), seed, self.rate, self.target]
        facts += [self.nodes, EVERY, sorted(self.recipe.items())]
        place = f"{self.workload}-{self.nodes}n-{self.rate}"
        return self.results / f"{name_of(place, method, seed, json.dumps(facts))}.json"


def check(options: Options) -> None:
    """Raise `LabError` for options that no rank could run, before a cluster is created."""
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


def run(options: Options, watcher: Watcher) -> list[dict[str, Any]]:
    """One flat row per seed and method; methods take turns, seed by seed. Complete runs are not repeated."""
    todo = [(seed, method) for seed in range(options.seeds) for method in options.methods]
    rows = [read(options.file(method, seed)) for seed, method in todo]
    watcher.advance(len(rows) - rows.count(None))
    if None in rows:
        options.results.mkdir(parents=True, exist_ok=True)
        _fill(options, todo, rows, watcher)
    found = [row["row"] for row in rows if row is not None]
    for row in found:
        row["speedup_over_fp32"] = _speedup(row, found)
    return found


def _fill(options: Options, todo: list[tuple[int, str]], rows: list[dict[str, Any] | None], watcher: Watcher) -> None:
    """Run what is missing, on one cluster."""
    with Cluster(options.nodes, 1, options.rate) as cluster:
        measured, good = None, False
        if cluster.mode == "loopback":
            watcher.tell(f"not shaped: {cluster.why}")
        else:
            calibration = calibrate(cluster, watcher)
            measured, good = calibration.measured, calibration.good
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
                raise Unfinished(f"time limit reached before {method}, seed {seed}: repeat the command to continue")
            row = {**_one(cluster, options, method, seed), **place}
            rows[i] = {"spec": {"method": method, "seed": seed, "recipe": options.recipe}, "row": row}
            options.file(method, seed).write_text(json.dumps(rows[i]) + "\n")
            watcher.advance(1)


def _one(cluster: Cluster, options: Options, method: str, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    words = {
        "workload": options.workload,
        "data": str(options.data.resolve()),
        "method": method,
        "seed": seed,
        "target": options.target,
        "every": EVERY,
        "recipe": options.recipe,
    }
    pinned = follow(cluster, worker("converge_worker", words), lambda rank, item: row.update(item))
    if "value" not in row:
        raise LabError(f"the job with {method} ended without a result")
    if cluster.mode == "loopback":
        row["bytes_per_rank"] = row["counted_by"] = row["compression_rate"] = None
    return {**row, "pinned": pinned}


def _speedup(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    base = next((other for other in rows if other["method"] == BASE and other["seed"] == row["seed"]), None)
    own = row["seconds_to_target"]
    return base["seconds_to_target"] / own if base and base["seconds_to_target"] and own else None
