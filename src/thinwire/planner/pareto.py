"""Dynamic programming over the side-stream recurrence; exact for single tensors and for groups of consecutive tensors.

After a prefix of the tensors, the rest depends only on (g, c, p): the times at which backward continues, the stream is free
and the CPU is free. All later times increase with each of them, so only Pareto-optimal states are kept per prefix. States
whose lower bound exceeds a known plan are dropped as well (`_bounds`); neither loses the optimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernels.cpu._jit import Doubles, Offsets, kernel
from .side_stream import CPU, GPU, LEAD, SER

STEPS = 10
"""For bounds: F is at least any weighted mean of the ends of backward, stream and CPU; weights are multiples of 1 / STEPS."""


COLUMNS = 7
BOUND = 6


@dataclass(slots=True)
class Problem:
    """The options of a group that ends before tensor j and has lengths[k] tensors are rows offsets[cell] to offsets[cell + 1]
    of vector, with cell = j * len(lengths) + k."""

    compute: Doubles
    lengths: Offsets
    offsets: Offsets
    vector: Doubles


@dataclass(slots=True)
class Solution:
    """seconds: F. groups: (first tensor, one past the last, row). cut: see `solve`."""

    seconds: float
    groups: list[tuple[int, int, int]]
    cut: bool


def solve(problem: Problem, limit: int = 0, beams: Sequence[int] = (16,)) -> Solution:
    """Minimize F. Narrow passes first find a plan, whose F bounds the final pass.

    limit: most states kept per tensor (0: all). If it was reached, `cut` is set, and F may not be the minimum.
    """
    work = (problem.compute, problem.lengths, problem.offsets, problem.vector)
    weights = _weights(bool(problem.vector[:, CPU].any()))
    weighted, tails = _bounds(*work, weights)
    best = Solution(np.inf, [], True)
    for width in (*(beam for beam in beams if not limit or beam < limit), limit or 1 << 40):
        upper = best.seconds * (1 + 1e-12)
        states, first, cut = _search(*work, weights, weighted, tails, upper, width)
        found = _trace(problem, states, first, bool(cut))
        if found is not None and found.seconds <= best.seconds:
            best = found
        if not cut:
            break
    return best


def _weights(cpu: bool) -> Doubles:
    """[means, 2]: weights of stream and CPU; the rest is backward's. The most even ones come first, they prune most."""
    found = [(c / STEPS, p / STEPS) for c in range(STEPS + 1) for p in range(STEPS + 1 - c if cpu else 1)]
    return np.array(sorted(found, key=lambda pair: max(*pair, 1 - sum(pair))))


def _trace(problem: Problem, states: Doubles, first: Offsets, cut: bool) -> Solution | None:
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
    return Solution(seconds, groups[::-1], cut)


def lengths_up_to(count: int, dense: int = 16, growth: float = 1.2) -> Offsets:
    """Allowed group sizes: every number up to `dense`, then growing steps up to all tensors."""
    found = list(range(1, min(count, dense) + 1))
    while found[-1] < count:
        found.append(min(count, max(found[-1] + 1, int(found[-1] * growth))))
    return np.array(found, np.int64)


def singles(compute: Doubles, offsets: Offsets, vector: Doubles) -> Problem:
    """Single tensors: rows offsets[i] to offsets[i + 1] are the options of tensor i."""
    return Problem(compute, np.ones(1, np.int64), np.concatenate([[0], offsets]), vector)


@kernel
def _bounds(compute, lengths, offsets, vector, weights):  # type: ignore[no-untyped-def]
    """Lower bounds for the rest from tensor j on: weighted[j, w], the minimum weighted sum of gpu, ser and cpu; tails[j, w],
    the minimum weighted time from when backward starts tensor j to the end."""
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
                    stream, cpu_weight = weights[w]
                    value = (1.0 - stream - cpu_weight) * gpu + stream * ser + cpu_weight * cpu + weighted[stop, w]
                    weighted[start, w] = min(weighted[start, w], value)
    # The stream cannot run ahead of backward: from a free stream, the end is no earlier than that of the next chain, and no
    # earlier than the rest after it with the stream free again.
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
                    stream, cpu_weight = weights[w]
                    value = (1.0 - stream - cpu_weight) * (gpu + left) + stream * chain + cpu_weight * max(cpu, gpu)
                    value = max(value + weighted[stop, w], gpu + tails[stop, w])
                    tails[start, w] = min(tails[start, w], span + value)
    return weighted, tails


@kernel
def _search(compute, lengths, offsets, vector, weights, weighted, tails, upper, limit):  # type: ignore[no-untyped-def]
    """The states that are kept, [states, 7]: g, c, p, parent, row, length, bound; rows first[j] to first[j + 1] are those
    before tensor j."""
    count, kinds = compute.shape[0], lengths.shape[0]
    total = np.zeros(count + 1)
    for i in range(count):
        total[i + 1] = total[i] + compute[i]
    states = np.zeros((1024, COLUMNS))
    first = np.zeros(count + 2, np.int64)
    first[1] = filled = 1
    cut = False
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
            # Rows in the outer loop: successive parents then have rising g, which `_order` exploits.
            for row in range(offsets[cell], offsets[cell + 1]):
                lead, cpu, gpu, ser = vector[row, LEAD], vector[row, CPU], vector[row, GPU], vector[row, SER]
                for parent in range(first[start], first[start + 1]):
                    r = states[parent, 0] + span
                    x, p = r + lead, states[parent, 2]
                    if cpu > 0.0:
                        x = max(p, x) + cpu
                        p = x
                    g = r + gpu
                    # Times before g no longer matter, so they are equal.
                    c = max(max(states[parent, 1], x) + ser, g)
                    p = max(p, g)
                    bound = max(g + tail, c)
                    for w in range(weights.shape[0]):
                        if bound > upper:
                            break
                        stream, cpu_weight = weights[w, 0], weights[w, 1]
                        value = (1.0 - stream - cpu_weight) * (g + left) + stream * c + cpu_weight * p
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
        first[stop + 1] = filled
    return states, first, cut


@kernel
def _undominated(fresh, new, states, filled):  # type: ignore[no-untyped-def]
    """Append the states of fresh[:new] that are Pareto-optimal in g, c and p; returns their number.

    In order of g, a state is dominated if an earlier one has no larger c and p; those form a staircase, c rising, p falling.
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
    """Keep the `limit` states with the lowest bounds, in order; returns their end."""
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
    """Merge sort of `count` rows from `begin` by one column, then another, starting from the runs that already ascend."""
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
