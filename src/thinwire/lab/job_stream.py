"""Jobs on an emulated cluster that report results as JSON lines."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .calibrate import Calibration
from .cluster import Cluster
from .netns import LabError


@dataclass(frozen=True)
class Watcher:
    """Progress callbacks: messages for the user, and units of work that are complete."""

    tell: Callable[[str], None] = lambda text: None
    advance: Callable[[int], None] = lambda count: None


def worker(module: str, options: Mapping[str, object]) -> list[str]:
    """The command that runs a module of this package; it gets these options as JSON, its only argument."""
    return [sys.executable, "-m", f"thinwire.lab.{module}", json.dumps(options)]


def calibrate(cluster: Cluster, watcher: Watcher) -> Calibration:
    """Measure the links and report the result, with a warning if they miss their rate."""
    found = cluster.calibrate()
    watcher.tell(f"{cluster.nodes} nodes, {found}")
    if not found.good:
        watcher.tell("the links are not within 15 % of the rate: do not rely on the times")
    return found


def follow(cluster: Cluster, command: list[str], hear: Callable[[int, dict[str, Any]], None]) -> bool:
    """Run a job to its end, calling `hear(rank, object)` per JSON line in the calling thread. Whether ranks were pinned."""
    news: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
    noise: list[str] = []

    def read(rank: int, line: str) -> None:
        try:
            news.put((rank, dict(json.loads(line))))
        except (ValueError, TypeError):
            noise.append(f"[{rank}] {line}")

    job = cluster.start(command, on_line=read)
    while True:
        try:
            hear(*news.get(timeout=0.2))
        except queue.Empty:
            if not job.running:
                break
    result = job.wait()
    if result.code:
        raise LabError("\n".join([f"the benchmark's job ended with code {result.code}:", *noise[-30:]]))
    return bool(result.pinned)
