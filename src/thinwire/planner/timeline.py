"""Event simulation of a step on GPU, links and CPU (docs/methods/espresso.md).

    gpu     backward, which codec operations interrupt; codec operations first come first served
    links   one lane ("comm"), or one per name: first come first served, or strictly in the order of the tensors
    cpu     a pool of workers, first come first served

The searches use the faster recurrence of `side_stream`; this simulation also covers overlapping chains.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

Chain = Sequence[tuple[str, float]]
"""The operations of a tensor: lane and seconds."""


@dataclass(slots=True)
class Lane:
    """Waiting operations (arrival time, tensor, index in its chain) and running ones (end time, tensor, index)."""

    workers: int = 1
    waiting: list[tuple[float, int, int]] = field(default_factory=list)
    running: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Timeline:
    """seconds: from the start of backward to the end of everything. ready: times per tensor. spans: per operation."""

    seconds: float
    ready: list[float]
    spans: list[list[tuple[float, float]]]


def run(
    compute: Sequence[float], chains: Sequence[Chain], *, cpu_workers: int = 1, in_order: bool = False
) -> Timeline:
    """Tensor i is ready after another compute[i] seconds of backward; then its chain runs.

    in_order: links start tensors strictly in order, as collectives that all ranks must issue alike do.
    """
    lanes = {lane: Lane() for chain in chains for lane, _ in chain}
    gpu = lanes.setdefault("gpu", Lane())
    if "cpu" in lanes:
        lanes["cpu"].workers = cpu_workers
    first = [next((at for at, (lane, _) in enumerate(chain) if lane not in ("gpu", "cpu")), -1) for chain in chains]
    spans: list[list[tuple[float, float]]] = [[] for _ in chains]
    ready: list[float] = []
    entered: set[int] = {tensor for tensor, at in enumerate(first) if at < 0}
    now, left, tensor = 0.0, compute[0] if compute else 0.0, 0

    def queue(owner: int, at: int) -> None:
        if at < len(chains[owner]):
            heapq.heappush(lanes[chains[owner][at][0]].waiting, (now, owner, at))

    def take(name: str, lane: Lane) -> tuple[float, int, int] | None:
        if not in_order or name in ("gpu", "cpu"):
            return heapq.heappop(lane.waiting)
        turn = next((index for index in range(len(chains)) if index not in entered), len(chains))
        for item in sorted(lane.waiting):
            if item[1] < turn or (item[1] == turn and item[2] == first[turn]):
                lane.waiting.remove(item)
                heapq.heapify(lane.waiting)
                entered.add(item[1])
                return item
        return None

    while True:
        for name, lane in lanes.items():
            while lane.waiting and len(lane.running) < lane.workers:
                item = take(name, lane)
                if item is None:
                    break
                _, owner, at = item
                heapq.heappush(lane.running, (now + chains[owner][at][1], owner, at))
                spans[owner].append((now, now + chains[owner][at][1]))
        computing = tensor < len(compute) and not gpu.running
        ends = [lane.running[0][0] for lane in lanes.values() if lane.running]
        if computing:
            ends.append(now + left)
        if not ends:
            return Timeline(now, ready, spans)
        later = min(ends)
        if computing:
            finished = now + left <= later
            left -= later - now
        now = later
        for lane in lanes.values():
            while lane.running and lane.running[0][0] <= now:
                _, owner, at = heapq.heappop(lane.running)
                queue(owner, at + 1)
        if computing and finished:
            ready.append(now)
            queue(tensor, 0)
            tensor += 1
            left = compute[tensor] if tensor < len(compute) else 0.0
