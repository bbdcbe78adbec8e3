"""The main job: two machines with a slow link between them train a small model, plainly and through thinwire."""

from __future__ import annotations

import json
import pydoc_data
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cluster import Cluster
from .netns import LabError

WARM_UP = 8  # steps that are left out of the times: DDP's first buckets, and those that thinwire sends dense


def shipped_text() -> Path:
    """Half a megabyte of English that comes with every Python: the texts of its own help."""
    return Path(next(iter(pydoc_data.__path__))) / "topics.py"


@dataclass
class Outcome:
    """One training run."""

    method: str
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    bytes_per_step: float | None = None
    """Bytes that a node sent a step, from its interface counters."""

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds[WARM_UP:])

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-10:])


def train(cluster: Cluster, method: str, steps: int, data: Path | None, on_step: Callable[[Outcome], None]) -> Outcome:
    """Run one job on the cluster; `on_step` after every step."""
    outcome = Outcome(method)
    noise: list[str] = []

    def read(rank: int, line: str) -> None:
        try:
            news = json.loads(line)
        except ValueError:
            noise.append(f"[{rank}] {line}")
            return
        if "stats" in news:
            outcome.stats = news["stats"]
        elif "loss" in news:
            outcome.seconds.append(news["seconds"])
            outcome.losses.append(news["loss"])
            on_step(outcome)

    command = [sys.executable, "-m", "thinwire.lab.train", "--method", method, "--steps", str(steps)]
    result = cluster.run([*command, "--data", str(data or shipped_text())], on_line=read, timeout=600)
    if result.code:
        raise LabError("\n".join([f"the job with {method} ended with code {result.code}:", *noise[-20:]]))
    if result.traffic:
        outcome.bytes_per_step = statistics.fmean(node.bytes_sent for node in result.traffic) / steps
    return outcome
