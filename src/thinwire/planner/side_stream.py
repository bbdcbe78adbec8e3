"""A model of DDP on GPUs with one side stream: chains run one after the other, in the order of the tensors.

The recurrence is derived in docs/methods/espresso.md. An option for a tensor is four durations in seconds (`costs.vectors`):
codec work before the first collective, on the GPU (`lead`) and on the CPU (`cpu`); all codec work on the GPU (`gpu`); and
everything after the lead (`ser`).

    r = g + compute                       the tensor is ready
    x = r + lead                          or max(p, r) + cpu if the CPU compresses, which is then busy until p = x
    c = max(c, x) + ser                   the end of its chain on the side stream
    g = r + gpu                           codec work on the GPU delays the rest of backward
    F = max(c, g) at the end

A group of tensors counts as one tensor that is ready with its last member.
"""

from typing import Any

import numpy as np

from ..kernels.cpu._jit import Doubles, kernel

LEAD, CPU, GPU, SER = range(4)


def schedule(compute: Doubles, vector: Doubles) -> Doubles:
    """compute [n], vector [n, 4] -> [n, 3]: per tensor, seconds when it is ready, its chain begins, its chain ends."""
    out = np.zeros((len(compute), 3))
    _schedule(compute, vector, out)
    return out


@kernel
def _advance(g: float, c: float, p: float, compute: float, vector: Doubles, i: int) -> Any:
    """One tensor of the recurrence: r, begin of its chain, and the new g, c and p."""
    r = g + compute
    x = r + vector[i, LEAD]
    if vector[i, CPU] > 0.0:
        x = max(p, x) + vector[i, CPU]
        p = x
    begin = max(c, x)
    return r, begin, r + vector[i, GPU], begin + vector[i, SER], p


@kernel
def finish_time(compute: Doubles, vector: Doubles) -> Any:
    """F: seconds from the start of backward to the end of the last chain."""
    g = c = p = 0.0
    for i in range(compute.shape[0]):
        _, _, g, c, p = _advance(g, c, p, compute[i], vector, i)
    return max(c, g)


@kernel
def _schedule(compute: Doubles, vector: Doubles, out: Doubles) -> None:
    g = c = p = 0.0
    for i in range(compute.shape[0]):
        out[i, 0], out[i, 1], g, c, p = _advance(g, c, p, compute[i], vector, i)
        out[i, 2] = c


@kernel
def last_bubble(compute: Doubles, vector: Doubles) -> Any:
    """The last tensor that was not ready when all earlier chains had ended: changes to earlier tensors cannot delay it.

    A link that waits for codec work inside a chain, or for the lead of a tensor that is ready, is not a bubble.
    """
    g = c = p = 0.0
    found = 0
    for i in range(compute.shape[0]):
        ended = c
        r, _, g, c, p = _advance(g, c, p, compute[i], vector, i)
        if ended < r:
            found = i
    return found


@kernel
def improve(compute: Doubles, vector: Doubles, picks: Any, order: Any, offsets: Any, rows: Doubles) -> None:
    """Espresso's Algorithm 1: for each tensor in `order`, the row that reduces F most, if any. Modifies vector and picks.

    rows[offsets[i] : offsets[i + 1]] are the options of tensor i. Uncompressed tensors before a bubble are not tried again.
    """
    count = compute.shape[0]
    dropped = np.zeros(count, np.bool_)
    before = np.zeros((1, 4))
    best = finish_time(compute, vector)
    for turn in range(-1, count):
        if turn >= 0:
            tensor = order[turn]
            if dropped[tensor]:
                continue
            _copy(vector, tensor, before, 0)
            chosen = -1
            for row in range(offsets[tensor], offsets[tensor + 1]):
                _copy(rows, row, vector, tensor)
                seconds = finish_time(compute, vector)
                if seconds < best:
                    best, chosen = seconds, row
            if chosen >= 0:
                picks[tensor] = chosen
                _copy(rows, chosen, vector, tensor)
            else:
                _copy(before, 0, vector, tensor)
        for earlier in range(last_bubble(compute, vector)):
            if picks[earlier] < 0:
                dropped[earlier] = True


@kernel
def offload(
    compute: Doubles, vector: Doubles, moved: Doubles, members: Any, edges: Any, most: int, counts: Any
) -> Any:
    """Espresso's Algorithm 2: how many tensors of each group, the earliest first, are compressed on the CPU. Fills counts.

    members[edges[k] : edges[k + 1]] are the tensors of group k; moved [n, 4] are their costs with the codec on the CPU.
    Tries all combinations if there are at most `most`, otherwise one group at a time until nothing improves.
    """
    groups = edges.shape[0] - 1
    combinations = 1.0
    for k in range(groups):
        combinations *= edges[k + 1] - edges[k] + 1
    best, trial = finish_time(compute, vector), vector.copy()
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
            seconds = finish_time(compute, trial)
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
                seconds = finish_time(compute, trial)
                if seconds < best:
                    best = seconds
                    counts[k] = count
            improved = improved or counts[k] != before
            _move(vector, moved, members, edges[k], edges[k + 1], counts[k], trial)
    return best


@kernel
def _move(vector: Doubles, moved: Doubles, members: Any, start: int, stop: int, count: int, trial: Doubles) -> None:
    """Set the first `count` members of a group to their costs on the CPU, the others to their costs on the GPU."""
    for at in range(start, stop):
        tensor = members[at]
        _copy(moved if at - start < count else vector, tensor, trial, tensor)


@kernel
def _copy(source: Doubles, row: int, target: Doubles, at: int) -> None:
    """Copy a row. (Array assignment of rows costs seconds of compile time.)"""
    for column in range(4):
        target[at, column] = source[row, column]
