"""A benchmark's job on a cluster, which says what it finds as JSON lines."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Sequence
from typing import Any

from .cluster import Cluster
from .netns import LabError


def follow(cluster: Cluster, command: Sequence[str], hear: Callable[[dict[str, Any]], None]) -> bool:
    """Run a job to its end; `hear` is given each line, in the thread that calls. Whether ranks had cores of their own."""
    news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    noise: list[str] = []

    def read(rank: int, line: str) -> None:
        try:
            news.put(dict(json.loads(line)))
        except (ValueError, TypeError):
            noise.append(f"[{rank}] {line}")

    job = cluster.start(list(command), on_line=read)
    while True:
        try:
            hear(news.get(timeout=0.2))
        except queue.Empty:
            if not job.running:
                break
    result = job.wait()
    if result.code:
        raise LabError("\n".join([f"the benchmark's job ended with code {result.code}:", *noise[-30:]]))
    return bool(result.pinned)
