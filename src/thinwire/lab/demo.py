"""The job of `thinwire demo`: machines joined by a slow link train a small model with plain DDP or with thinwire."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine import journal
from ..engine.pauses import durations, longest, pauses
from ..version import __version__
from .cluster import Cluster
from .demo_setup import WORKLOAD, Setup
from .netns import LabError

PATIENCE = 3600.0


@dataclass
class Outcome:
    """One training run, as rank 0 saw it."""

    method: str
    began: float = field(default_factory=time.time)
    steps: int = 0
    """How many there will be; 0 until the job has said so."""
    ends: list[float] = field(default_factory=list)
    """Seconds from the start of the run, before DDP is built and a codec attached, to the end of each step."""
    losses: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """How each step's gradients went: as in a journal, "layout", "dense" or "ddp"."""
    sent: list[int | None] = field(default_factory=list)
    """Bytes sent by a node since the start, from interface counters."""
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> list[float]:
        return durations(self.ends)

    @property
    def total_seconds(self) -> float:
        return self.ends[-1]

    @property
    def step_seconds(self) -> float:
        """Median of the second half; in the first, DDP rebuilds its buckets and thinwire plans."""
        return statistics.median(self.seconds[len(self.ends) // 2 :])

    @property
    def measuring_seconds(self) -> float:
        """All pauses together: attaching, measuring, planning."""
        return sum(pauses(self.seconds, self.paths or ["ddp"] * len(self.ends)))

    @property
    def longest_pause_seconds(self) -> float:
        return longest(self.seconds)

    @property
    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-10:])

    @property
    def bytes_sent(self) -> int | None:
        return self.sent[-1] if self.sent else None

    @property
    def compressed(self) -> bool:
        """Whether the run ended with compressed gradients."""
        return self.paths[-1:] == ["layout"]

    def write_journal(self, path: Path, world: int) -> None:
        """Write the step times and losses of a run without thinwire as a journal."""
        node, began = platform.node(), self.began
        size = None if self.bytes_sent is None else self.bytes_sent / len(self.ends)
        with path.open("wb") as file:
            start = journal.Start(
                journal.VERSION, began, 0, world, self.method, __version__, metadata.version("torch"), node
            )
            file.write(journal.encode(start) + b"\n")
            for step, (seconds, loss, end) in enumerate(zip(self.seconds, self.losses, self.ends, strict=True), 1):
                for line in (
                    journal.Step(step, began + end, seconds, path="ddp", link_bytes=size),
                    journal.Note(step, began + end, {"loss": loss}),
                ):
                    file.write(journal.encode(line) + b"\n")


def train(
    cluster: Cluster,
    method: str,
    setup: Setup,
    on_news: Callable[[Outcome], None],
    *,
    steps: int | None = None,
    log: Path | None = None,
) -> Outcome:
    """Run a job on the cluster, calling `on_news` when its length is known and after every step.

    Without `steps`, here or in `setup`, the job chooses as many as both runs can take in `setup.seconds`. Ranks with a wire
    write journals to `log`.
    """
    outcome = Outcome(method)
    noise: list[str] = []

    def read(rank: int, line: str) -> None:
        try:
            news = dict(json.loads(line))
        except (ValueError, TypeError):
            noise.append(f"[{rank}] {line}")
            return
        if "stats" in news:
            outcome.stats = news["stats"]
        elif "steps" in news:
            outcome.steps, outcome.began = news["steps"], news["began"]
            on_news(outcome)
        elif "loss" in news:
            outcome.ends.append(news["end"])
            outcome.losses.append(news["loss"])
            outcome.sent.append(news["sent"])
            on_news(outcome)

    words: dict[str, object] = {"workload": WORKLOAD, "method": method, "data": setup.text, "lr": setup.lr}
    steps = steps or setup.steps
    words |= {"seconds": setup.seconds} if steps is None else {"steps": steps}
    words |= {"log": log} if log is not None else {}
    options = [text for name, value in words.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "thinwire.lab.train", *options]
    result = cluster.run(command, on_line=read, timeout=PATIENCE)
    if result.code:
        raise LabError("\n".join([f"the job with {method} ended with code {result.code}:", *noise[-20:]]))
    outcome.paths = ["ddp"] * len(outcome.ends)
    if method != "fp32" and log is not None:
        taken = journal.read(journal.files(log)[0]).by_step
        outcome.paths = [taken[n].path if n in taken else "ddp" for n in range(1, len(outcome.ends) + 1)]
    return outcome
