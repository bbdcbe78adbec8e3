"""Multi-threaded passes over a whole group, in slices.

`set_threads(n)` or THINWIRE_THREADS sets the number of threads; the default is one, because a rank usually has one core and
backward runs on it. Slices do not depend on the number of threads, and their results are combined in order, so neither do
results. Kernels release the interpreter lock, so threads run in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from . import basic, laplace, micro
from ._jit import Floats, Indices

Result = TypeVar("Result")

SLICE = 1 << 20  # elements: a multiple of every kernel's tile, and large enough to amortise the hand-over

pool: ThreadPoolExecutor | None = None
"""None while one thread does all the work: kernels can then be called without a way through here."""
_threads = 1


def set_threads(count: int) -> None:
    """Let `count` threads of this process share the passes over memory, for all wires together."""
    global pool, _threads
    if not (isinstance(count, int) and count >= 1):
        raise ValueError(f"the number of threads must be a whole number from 1 on, not {count!r}")
    if pool is not None:
        pool.shutdown()
    # The calling thread works too.
    pool = ThreadPoolExecutor(count - 1, thread_name_prefix="thinwire-kernel") if count > 1 else None
    _threads = count


def threads() -> int:
    return _threads


def each_slice(size: int, work: Callable[[int, int], Result]) -> list[Result]:
    """`work(start, stop)` for every slice of [0, size), shared by the threads; results in order."""
    return each([(start, min(start + SLICE, size)) for start in range(0, size, SLICE)], work)


def each(places: list[tuple[int, int]], work: Callable[[int, int], Result]) -> list[Result]:
    if pool is None or len(places) < 2:
        return [work(*place) for place in places]
    share = -(-len(places) // _threads)
    rest = [pool.submit(lambda part: [work(*place) for place in part], places[i : i + share])
            for i in range(share, len(places), share)]  # fmt: skip
    results = [work(*place) for place in places[:share]]
    for future in rest:
        results += future.result()
    return results


def accumulate(residual: Floats, gradient: Floats) -> bool:
    """`basic.accumulate`."""
    return all(each_slice(residual.size, lambda a, b: basic.accumulate(residual[a:b], gradient[a:b])))


def clear(out: Floats) -> None:
    """`basic.clear`."""
    each_slice(out.size, lambda a, b: basic.clear(out[a:b]))


def accumulate_select_segments(
    residual: Floats,
    gradient: Floats,
    start: int,
    stop: int,
    ends: NDArray[np.int64],
    thresholds: Floats,
    indices: Indices,
) -> tuple[bool, int, int]:
    """`micro.accumulate_select_segments`."""
    if pool is None or residual.size <= SLICE:
        return micro.accumulate_select_segments(residual, gradient, start, stop, ends, thresholds, indices)

    def work(a: int, b: int) -> tuple[bool, int, Indices]:
        first, last = max(start, a) - a, max(min(stop, b) - a, 0)
        found = np.empty(min(max(last - first, 0), indices.size), np.int32)
        finite, wanted, written = micro.accumulate_select_segments(
            residual[a:b], gradient[a:b], first, last, ends - a, thresholds, found
        )
        return finite, wanted, found[:written] + np.int32(first + a - start)

    parts = each_slice(residual.size, work)
    wanted = sum(part[1] for part in parts)
    written = _join([part[2] for part in parts], indices)
    return all(part[0] for part in parts), wanted, min(wanted, written)


def accumulate_collect(
    residual: Floats, gradient: Floats, threshold: float, indices: Indices, values: Floats
) -> tuple[bool, int, float]:
    """`laplace.accumulate_collect`; if more is wanted than fits, the excess is estimated from the slices that fit."""

    def collect(a: int, b: int, found: Indices, their: Floats) -> tuple[bool, int, float]:
        return laplace.accumulate_collect(residual[a:b], gradient[a:b], threshold, found, their)

    finite, wanted, excess, _ = _listing(residual.size, collect, indices, values)
    return finite, wanted, excess


def accumulate_take(
    residual: Floats,
    gradient: Floats,
    threshold: float,
    window: tuple[int, int],
    coding: int,
    indices: Indices,
    values: Floats,
) -> tuple[bool, bool, int, float]:
    """`laplace.accumulate_take` if the count above the threshold is in the window, else `accumulate_collect`.

    Returns (taken, finite, wanted, excess). Otherwise what was taken is put back, exact up to the rounding to 16 bits.
    """

    def take(a: int, b: int, found: Indices, their: Floats) -> tuple[bool, int, float]:
        return laplace.accumulate_take(residual[a:b], gradient[a:b], threshold, coding, found, their)

    finite, wanted, excess, parts = _listing(residual.size, take, indices, values)
    low, high = window
    taken = finite and low <= wanted <= min(high, indices.size)
    if not taken:
        for places, sent in parts:
            basic.put_back(residual, places, sent)
        written = indices[: min(wanted, indices.size)]
        values[: written.size] = residual[written]
    return taken, finite, wanted, excess


def _listing(
    size: int,
    work: Callable[[int, int, Indices, Floats], tuple[bool, int, float]],
    indices: Indices,
    values: Floats,
) -> tuple[bool, int, float, list[tuple[Indices, Floats]]]:
    """Run a pass that lists elements, slice by slice, into `indices` and `values`; also returns the lists per slice."""
    room = indices.size

    def listed(a: int, b: int, found: Indices, their: Floats) -> tuple[bool, int, float, Indices, Floats]:
        finite, wanted, excess = work(a, b, found, their)
        kept = min(wanted, found.size)
        found[:kept] += np.int32(a)
        return finite, wanted, excess, found[:kept], their[:kept]

    def apart(a: int, b: int) -> tuple[bool, int, float, Indices, Floats]:
        count = min(b - a, room)
        return listed(a, b, np.empty(count, np.int32), np.empty(count, np.float32))

    if pool is None:
        parts, at = [], 0
        for a in range(0, size, SLICE):  # each continues where the one before ended
            parts.append(listed(a, min(a + SLICE, size), indices[at:], values[at:]))
            at += parts[-1][3].size
    else:
        parts = each_slice(size, apart)
        _join([part[3] for part in parts], indices)
        _join([part[4] for part in parts], values)
    wanted, counted, excess = 0, 0, 0.0
    for part in parts:
        wanted += part[1]
        if wanted <= room:
            counted, excess = wanted, excess + part[2]
    if wanted > room:
        excess *= room / max(counted, 1)
    return all(part[0] for part in parts), wanted, excess, [part[3:] for part in parts]


def _join(parts: list[NDArray[np.generic]] | list[Indices] | list[Floats], out: NDArray[np.generic]) -> int:
    """Concatenate parts into `out` as far as they fit; returns the number of elements."""
    at = 0
    for part in parts:
        kept = min(part.size, out.size - at)
        out[at : at + kept] = part[:kept]
        at += kept
    return at


def _wished() -> int:
    text = os.environ.get("THINWIRE_THREADS", "1")
    if not (text.isdecimal() and int(text) >= 1):
        raise ValueError(f"THINWIRE_THREADS must be a whole number from 1 on, not {text!r}")
    return int(text)


set_threads(_wished())
