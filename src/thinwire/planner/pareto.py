"""The dynamic program over recurrence SS: exact for tensors one by one, and for runs of them that are fused into groups.

After some tensors have been dealt with, all that matters for the rest is (g, c, p): when backward goes on, when the stream
is free, when the processor is. Every number of the rest rises with each of them, so of all ways to come to some tensor only
those need be kept that no other beats in all three. A way is also given up when even the best that could follow is above a
plan that is known (`_bounds`); both leave the optimum in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu._jit import kernel
from .recurrence import CPU, GPU, LEAD, SER

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STEPS = 10
"""For bounds: F is at least any mean of the ends of backward, stream and processor; their weights are tenths."""


COLUMNS = 7
BOUND = 6


@dataclass(slots=True)
class Problem:
    """A group that ends before tensor j and has lengths[k] tensors may travel by rows offsets[cell] to offsets[cell + 1] of
    vector, cell = j * len(lengths) + k."""

    compute: Floats
    lengths: Ints
    offsets: Ints
    vector: Floats


@dataclass(slots=True)
class Solution:
    """seconds: F. groups: (first tensor, one past the last, row). widest: the most ways that were kept at some tensor."""

    seconds: float
    groups: list[tuple[int, int, int]]
    widest: int
    cut: bool


def solve(problem: Problem, limit: int = 0, beams: Sequence[int] = (16,)) -> Solution:
    """The least F. Narrow passes first give a plan, and with it the bound for the pass that counts.

    limit: at most so many ways are kept at each tensor (0: all). If it was met, `cut` is set, and F may not be the least.
    """
    work = (problem.compute, problem.lengths, problem.offsets, problem.vector)
    weights = _weights(bool(problem.vector[:, CPU].any()))
    weighted, tails = _bounds(*work, weights)
    best = Solution(np.inf, [], 0, True)
    for width in (*(beam for beam in beams if not limit or beam < limit), limit or 1 << 40):
        upper = best.seconds * (1 + 1e-12)
        states, first, widest, cut = _search(*work, weights, weighted, tails, upper, width)
        found = _trace(problem, states, first, int(widest), bool(cut))
        if found is not None and found.seconds <= best.seconds:
            best = found
        if not cut:
            break
    return best


def _weights(cpu: bool) -> Floats:
    """[means, 2]: the weights of stream and processor; backward has the rest. The most even ones first: they cut most."""
    found = [(c / STEPS, p / STEPS) for c in range(STEPS + 1) for p in range(STEPS + 1 - c if cpu else 1)]
    return np.array(sorted(found, key=lambda pair: max(*pair, 1 - sum(pair))))


def _trace(problem: Problem, states: Floats, first: Ints, widest: int, cut: bool) -> Solution | None:
    count = len(problem.compute)
    last = states[first[count] : first[count + 1]]
    if not len(last):
        return None
    ends = np.maximum(last[:, 0], last[:, 1])
    at = int(first[count] + np.argmin(ends))
    seconds, groups, stop = float(ends.min()), [], count
    while stop:
        parent, row, length = (int(value) for value in states[at, 3:6])
        groups.append((stop - length, stop, row))
        at, stop = parent, stop - length
    return Solution(seconds, groups[::-1], widest, cut)


def lengths_up_to(count: int, dense: int = 16, growth: float = 1.2) -> Ints:
    """How many tensors a group may have: every number up to `dense`, then fewer and fewer of them, up to all."""
    found = list(range(1, min(count, dense) + 1))
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, int(found[-1] * growth))))
    return np.array(found, np.int64)


def singles(compute: Floats, offsets: Ints, vector: Floats) -> Problem:
    """Every tensor by itself: rows offsets[i] to offsets[i + 1] are the ways of tensor i."""
    return Problem(compute, np.ones(1, np.int64), np.concatenate([[0], offsets]), vector)


@kernel
def _bounds(compute, lengths, offsets, vector, weights):  # type: ignore[no-untyped-def]
    """What must still come from tensor j on: weighted[j, w], the least weighted sum of gpu, ser and cpu; tails[j, w], the
    least weighted time from the moment backward turns to tensor j to the end."""
    count, kinds, means = compute.shape[0], lengths.shape[0], weights.shape[0]
    weighted = np.full((count + 1, means), np.inf)
    weighted[count] = 0.0
    for start in range(count - 1, -1, -1):
        for kind in range(kinds):
            stop = start + lengths[kind]
            if stop > count:
                break
            cell = stop * kinds + kind
            for row in range(offsets[cell], offsets[cell + 1]):
                gpu, ser, cpu = vector[row, GPU], vector[row, SER], vector[row, CPU]
                for w in range(means):
                    stream, processor = weights[w]
                    value = (1.0 - stream - processor) * gpu + stream * ser + processor * cpu + weighted[stop, w]
                    weighted[start, w] = min(weighted[start, w], value)
    # The stream cannot run ahead of backward: from a free stream the end is at least that of the chain that comes next, and
    # at least what is left after it with the stream free again.
    tails = np.zeros((count + 1, means))
    for start in range(count - 1, -1, -1):
        tails[start] = np.inf
        span, reached, left = 0.0, start, 0.0
        for k in range(start, count):
            left += compute[k]
        for kind in range(kinds):
            stop = start + lengths[kind]
            if stop > count:
                break
            while reached < stop:
                span += compute[reached]
                left -= compute[reached]
                reached += 1
            cell = stop * kinds + kind
            for row in range(offsets[cell], offsets[cell + 1]):
                gpu, cpu = vector[row, GPU], vector[row, CPU]
                chain = vector[row, LEAD] + cpu + vector[row, SER]
                for w in range(means):
                    stream, processor = weights[w]
                    value = (1.0 - stream - processor) * (gpu + left) + stream * chain + processor * max(cpu, gpu)
                    value = max(value + weighted[stop, w], gpu + tails[stop, w])
                    tails[start, w] = min(tails[start, w], span + value)
    return weighted, tails


@kernel
def _search(compute, lengths, offsets, vector, weights, weighted, tails, upper, limit):  # type: ignore[no-untyped-def]
    """All ways that are kept, [ways, 7]: g, c, p, parent, row, length, bound; those before tensor j are first[j] to
    first[j + 1]."""
    count, kinds = compute.shape[0], lengths.shape[0]
    total = np.zeros(count + 1)
    for i in range(count):
        total[i + 1] = total[i] + compute[i]
    states = np.zeros((1024, COLUMNS))
    first = np.zeros(count + 2, np.int64)
    first[1] = filled = 1
    widest, cut = 1, False
    fresh = np.zeros((1024, COLUMNS))
    for stop in range(1, count + 1):
        left, tail = total[count] - total[stop], tails[stop].max()
        new = 0
        for kind in range(kinds):
            start = stop - lengths[kind]
            if start < 0:
                break
            span = total[stop] - total[start]
            cell = stop * kinds + kind
            # Rows outside: the ways of one parent after the other then rise in g, which `_order` makes use of.
            for row in range(offsets[cell], offsets[cell + 1]):
                lead, cpu, gpu, ser = vector[row, LEAD], vector[row, CPU], vector[row, GPU], vector[row, SER]
                for parent in range(first[start], first[start + 1]):
                    r = states[parent, 0] + span
                    x, p = r + lead, states[parent, 2]
                    if cpu > 0.0:
                        x = max(p, x) + cpu
                        p = x
                    g = r + gpu
                    # What lies before g makes no difference any more, so it is not told apart.
                    c = max(max(states[parent, 1], x) + ser, g)
                    p = max(p, g)
                    bound = max(g + tail, c)
                    for w in range(weights.shape[0]):
                        if bound > upper:
                            break
                        stream, processor = weights[w, 0], weights[w, 1]
                        value = (1.0 - stream - processor) * (g + left) + stream * c + processor * p
                        bound = max(bound, value + weighted[stop, w])
                    if bound > upper:
                        continue
                    if new == fresh.shape[0]:
                        fresh = _doubled(fresh, new)
                    fresh[new, 0], fresh[new, 1], fresh[new, 2] = g, c, p
                    fresh[new, 3], fresh[new, 4], fresh[new, 5], fresh[new, 6] = parent, row, lengths[kind], bound
                    new += 1
        begin = filled
        while filled + new > states.shape[0]:
            states = _doubled(states, filled)
        filled += _undominated(fresh, new, states, filled)
        if filled - begin > limit:
            cut = True
            filled = _thinned(states, begin, filled, limit)
        widest = max(widest, filled - begin)
        first[stop + 1] = filled
    return states, first, widest, cut


@kernel
def _undominated(fresh, new, states, filled):  # type: ignore[no-untyped-def]
    """Append those of fresh[:new] that no other beats in g, c and p; returns how many.

    In the order of g a way is beaten if one before it has c and p no larger; these stand in a staircase, c rising, p falling.
    """
    stairs_c, stairs_p = np.zeros(new + 1), np.zeros(new + 1)
    height = kept = 0
    for index in _order(fresh, 0, 0, 1, new):
        c, p = fresh[index, 1], fresh[index, 2]
        low, high = 0, height  # steps below low have a c of at most this one
        while low < high:
            middle = (low + high) // 2
            if stairs_c[middle] <= c:
                low = middle + 1
            else:
                high = middle
        if low > 0 and stairs_p[low - 1] <= p:
            continue
        for column in range(COLUMNS):
            states[filled + kept, column] = fresh[index, column]
        kept += 1
        end = low
        while end < height and stairs_p[end] >= p:
            end += 1
        if low > 0 and stairs_c[low - 1] == c:
            low -= 1
        shift = low + 1 - end  # the steps from low to end become one
        if shift > 0:
            for at in range(height - 1, end - 1, -1):
                stairs_c[at + shift], stairs_p[at + shift] = stairs_c[at], stairs_p[at]
        elif shift < 0:
            for at in range(end, height):
                stairs_c[at + shift], stairs_p[at + shift] = stairs_c[at], stairs_p[at]
        height += shift
        stairs_c[low], stairs_p[low] = c, p
    return kept


@kernel
def _doubled(table, filled):  # type: ignore[no-untyped-def]
    grown = np.zeros((2 * table.shape[0], table.shape[1]))
    for row in range(filled):
        for column in range(table.shape[1]):
            grown[row, column] = table[row, column]
    return grown


@kernel
def _thinned(states, begin, filled, limit):  # type: ignore[no-untyped-def]
    """Keep the `limit` ways with the lowest bounds, in their order; returns where they end."""
    chosen = np.zeros(filled - begin, np.bool_)
    for index in _order(states, begin, BOUND, 1, filled - begin)[:limit]:
        chosen[index - begin] = True
    kept = begin
    for at in range(begin, filled):
        if chosen[at - begin]:
            for column in range(COLUMNS):
                states[kept, column] = states[at, column]
            kept += 1
    return kept


@kernel
def _order(table, begin, column, second, count):  # type: ignore[no-untyped-def]
    """`count` rows from `begin` in rising order of a column, then of another: runs that rise already are merged, two by two."""
    order = np.arange(begin, begin + count)
    other = order.copy()
    edges = np.zeros(count + 1, np.int64)
    runs = 0
    for at in range(1, count):
        if _before(table, begin + at, begin + at - 1, column, second):
            runs += 1
            edges[runs] = at
    runs += 1
    edges[runs] = count
    while runs > 1:
        merged = 0
        for run in range(0, runs, 2):
            start, middle, stop = edges[run], edges[run + 1], edges[min(run + 2, runs)]
            one, two = start, middle
            for at in range(start, stop):
                if two >= stop or (one < middle and not _before(table, order[two], order[one], column, second)):
                    other[at] = order[one]
                    one += 1
                else:
                    other[at] = order[two]
                    two += 1
            merged += 1
            edges[merged] = stop
        runs = merged
        order, other = other, order
    return order


@kernel
def _before(table, one, other, column, second):  # type: ignore[no-untyped-def]
    if table[one, column] != table[other, column]:
        return table[one, column] < table[other, column]
    return table[one, second] < table[other, second]
