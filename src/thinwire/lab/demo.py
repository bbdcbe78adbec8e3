"""The job of `thinwire demo`: two machines joined by a slow link train a small model with plain DDP or with thinwire."""

from __future__ import annotations

import itertools
import json
import platform
import pydoc_data
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine import journal
from ..version import __version__
from .cluster import Cluster
from .netns import LabError


def shipped_text() -> Path:
    """Half a megabyte of English text that ships with Python: its help texts."""
    return Path(next(iter(pydoc_data.__path__))) / "topics.py"


@dataclass
class Outcome:
    """One training run."""

    method: str
    began: float = field(default_factory=time.time)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    bytes_per_step: float | None = None
    """Bytes sent per node and step, from interface counters."""

    @property
    def step_seconds(self) -> float:
        """Median of the second half; in the first, DDP rebuilds its buckets and thinwire plans."""
        return statistics.median(self.seconds[len(self.seconds) // 2 :])

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-10:])

    def write_journal(self, path: Path, world: int) -> None:
        """Write the step times and losses of a run without thinwire as a journal."""
        node, began = platform.node(), self.began
        with path.open("wb") as file:
            start = journal.Start(
                journal.VERSION, began, 0, world, self.method, __version__, metadata.version("torch"), node
            )
            file.write(journal.encode(start) + b"\n")
            ends = itertools.accumulate(self.seconds, initial=began)
            for step, (seconds, loss, end) in enumerate(
                zip(self.seconds, self.losses, list(ends)[1:], strict=True), 1
            ):
                for line in (
                    journal.Step(step, end, seconds, path="ddp", link_bytes=self.bytes_per_step),
                    journal.Note(step, end, {"loss": loss}),
                ):
                    file.write(journal.encode(line) + b"\n")


def train(
    cluster: Cluster,
    method: str,
    steps: int,
    data: Path | None,
    on_step: Callable[[Outcome], None],
    log: Path | None = None,
) -> Outcome:
    """Run a job on the cluster, calling `on_step` after every step. Ranks with a wire write journals to `log`."""
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
    command += ["--log", str(log)] if log is not None else []
    result = cluster.run([*command, "--data", str(data or shipped_text())], on_line=read, timeout=600)
    if result.code:
        raise LabError("\n".join([f"the job with {method} ended with code {result.code}:", *noise[-20:]]))
    if result.traffic:
        outcome.bytes_per_step = statistics.fmean(node.bytes_sent for node in result.traffic) / steps
    return outcome
