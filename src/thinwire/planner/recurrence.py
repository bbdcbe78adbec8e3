"""Recurrence SS: a timeline in which each chain runs on one side stream, in the order of the tensors (specification, 3.4).

A way to exchange a tensor is four numbers of seconds (`costs.vectors`): codec before the first collective on the GPU (`lead`)
and on the processor (`cpu`), codec on the GPU in all (`gpu`), and all that follows the lead, one after the other (`ser`).

    r = g + compute                       the tensor is ready
    x = r + lead                          or max(p, r) + cpu, when the processor compresses; it is free again then (p = x)
    c = max(c, x) + ser                   its chain, after those before it
    g = r + gpu                           codec work on the GPU delays the rest of backward
    F = max(c, g) at the end

A group of tensors is one tensor that is ready when its last one is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu._jit import kernel

Floats = NDArray[np.float64]

LEAD, CPU, GPU, SER = range(4)


def times(compute: Floats, vector: Floats) -> Floats:
    """compute [n], vector [n, 4] -> [n, 3]: when each tensor is ready, when its chain enters the stream, when it ends."""
    out = np.zeros((len(compute), 3))
    follow(compute, vector, out)
    return out


@kernel
def finish(compute: Floats, vector: Floats) -> Any:
    """F: seconds from the start of backward to the end of the last chain."""
    g = c = p = 0.0
    for i in range(compute.shape[0]):
        r = g + compute[i]
        x = r + vector[i, LEAD]
        if vector[i, CPU] > 0.0:
            x = max(p, x) + vector[i, CPU]
            p = x
        c = max(c, x) + vector[i, SER]
        g = r + vector[i, GPU]
    return max(c, g)


@kernel
def follow(compute: Floats, vector: Floats, out: Floats) -> Any:
    """The same with the times of each chain in out [n, 3]: ready, begin in the stream, end."""
    g = c = p = 0.0
    for i in range(compute.shape[0]):
        r = g + compute[i]
        x = r + vector[i, LEAD]
        if vector[i, CPU] > 0.0:
            x = max(p, x) + vector[i, CPU]
            p = x
        out[i, 0], out[i, 1] = r, max(c, x)
        c = max(c, x) + vector[i, SER]
        out[i, 2] = c
        g = r + vector[i, GPU]
    return max(c, g)


@kernel
def last_bubble(compute: Floats, vector: Floats) -> Any:
    """The last tensor before which all chains had ended and that was not ready yet: what came earlier cannot delay it.

    A link that waits for codec work inside a chain, or for the lead of a tensor that is ready, is no bubble.
    """
    g = c = p = 0.0
    found = 0
    for i in range(compute.shape[0]):
        r = g + compute[i]
        if c < r:
            found = i
        x = r + vector[i, LEAD]
        if vector[i, CPU] > 0.0:
            x = max(p, x) + vector[i, CPU]
            p = x
        c = max(c, x) + vector[i, SER]
        g = r + vector[i, GPU]
    return found


@kernel
def improve(compute: Floats, vector: Floats, picks: Any, order: Any, offsets: Any, rows: Floats) -> None:
    """Espresso's Algorithm 1: for each tensor in `order` the row that shortens F most, if one does. Changes vector and picks.

    rows[offsets[i] : offsets[i + 1]] are the ways of tensor i. Whenever a bubble has appeared, tensors before it that travel
    uncompressed are struck out.
    """
    count = compute.shape[0]
    struck = np.zeros(count, np.bool_)
    before = np.zeros((1, 4))
    best = finish(compute, vector)
    for turn in range(-1, count):
        if turn >= 0:
            tensor = order[turn]
            if struck[tensor]:
                continue
            _copy(vector, tensor, before, 0)
            chosen = -1
            for row in range(offsets[tensor], offsets[tensor + 1]):
                _copy(rows, row, vector, tensor)
                seconds = finish(compute, vector)
                if seconds < best:
                    best, chosen = seconds, row
            if chosen >= 0:
                picks[tensor] = chosen
                _copy(rows, chosen, vector, tensor)
            else:
                _copy(before, 0, vector, tensor)
        for earlier in range(last_bubble(compute, vector)):
            if picks[earlier] < 0:
                struck[earlier] = True


@kernel
def offload(compute: Floats, vector: Floats, moved: Floats, members: Any, edges: Any, most: int, counts: Any) -> Any:
    """Espresso's Algorithm 2: how many of each group, the earliest first, go to the processor. Fills counts.

    members[edges[k] : edges[k + 1]] are the tensors of group k; moved [n, 4] is what each costs with its codec there.
    All combinations if there are at most `most`, otherwise one group after the other until nothing improves.
    """
    groups = edges.shape[0] - 1
    combinations = 1.0
    for k in range(groups):
        combinations *= edges[k + 1] - edges[k] + 1
    best, trial = finish(compute, vector), vector.copy()
    if combinations <= most:
        tried = np.zeros(groups, np.int64)
        while True:
            k = 0  # count up, like an odometer
            while k < groups and tried[k] == edges[k + 1] - edges[k]:
                for at in range(edges[k], edges[k + 1]):
                    _copy(vector, members[at], trial, members[at])
                tried[k] = 0
                k += 1
            if k == groups:
                return best
            tensor = members[edges[k] + tried[k]]
            _copy(moved, tensor, trial, tensor)
            tried[k] += 1
            seconds = finish(compute, trial)
            if seconds < best:
                best = seconds
                for at in range(groups):
                    counts[at] = tried[at]
    improved = True
    while improved:
        improved = False
        for k in range(groups):
            before = counts[k]
            for count in range(edges[k + 1] - edges[k] + 1):
                _move(vector, moved, members, edges[k], edges[k + 1], count, trial)
                seconds = finish(compute, trial)
                if seconds < best:
                    best = seconds
                    counts[k] = count
            improved = improved or counts[k] != before
            _move(vector, moved, members, edges[k], edges[k + 1], counts[k], trial)
    return best


@kernel
def _move(vector: Floats, moved: Floats, members: Any, start: int, stop: int, count: int, trial: Floats) -> None:
    """The first `count` of a group as on the processor, the others as they were."""
    for at in range(start, stop):
        tensor = members[at]
        _copy(moved if at - start < count else vector, tensor, trial, tensor)


@kernel
def _copy(source: Floats, row: int, target: Floats, at: int) -> None:
    """One row. (Assigning rows as such takes the compiler seconds.)"""
    for column in range(4):
        target[at, column] = source[row, column]
