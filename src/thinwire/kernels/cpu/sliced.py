"""The passes over a whole group, cut into slices that a few threads share.

`set_threads(n)` or the environment variable THINWIRE_THREADS says how many; one is the default, because a rank usually has
one core to itself and backward is on it. Slices are the same whatever the number of threads, and what they found is put
together in their order: results do not depend on it. Kernels release the interpreter lock, so threads run side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from . import basic, laplace, micro

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]
Result = TypeVar("Result")

SLICE = 1 << 20  # elements: a multiple of every kernel's tile, and large beside what handing it over costs

_pool: ThreadPoolExecutor | None = None
_threads = 1


def set_threads(count: int) -> None:
    """Let `count` threads of this process share the passes over memory, of all wires together."""
    global _pool, _threads
    if not (isinstance(count, int) and count >= 1):
        raise ValueError(f"the number of threads must be a whole number from 1 on, not {count!r}")
    if _pool is not None:
        _pool.shutdown()
    # The thread that asks works too.
    _pool = ThreadPoolExecutor(count - 1, thread_name_prefix="thinwire-kernel") if count > 1 else None
    _threads = count


def threads() -> int:
    return _threads


def each_slice(size: int, work: Callable[[int, int], Result]) -> list[Result]:
    """`work(start, stop)` for every slice of [0, size), shared by the threads; results in order."""
    return each([(start, min(start + SLICE, size)) for start in range(0, size, SLICE)], work)


def each(places: list[tuple[int, int]], work: Callable[[int, int], Result]) -> list[Result]:
    if _pool is None or len(places) < 2:
        return [work(*place) for place in places]
    share = -(-len(places) // _threads)
    rest = [_pool.submit(lambda part: [work(*place) for place in part], places[i : i + share])
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
    if _pool is None or residual.size <= SLICE:
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
    """`laplace.accumulate_collect`; where more is wanted than fits, the excess is estimated from the whole slices that fit."""

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
    """`laplace.accumulate_take` if as many elements as the window says lie above the threshold, else `accumulate_collect`.

    Returns (taken, finite, wanted, excess). What was taken in vain is put back, exactly where 16 bits could hold it.
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
    """A pass that lists elements, slice by slice, into `indices` and `values`; and what each slice has listed itself."""
    room = indices.size

    def listed(a: int, b: int, found: Indices, their: Floats) -> tuple[bool, int, float, Indices, Floats]:
        finite, wanted, excess = work(a, b, found, their)
        kept = min(wanted, found.size)
        found[:kept] += np.int32(a)
        return finite, wanted, excess, found[:kept], their[:kept]

    def apart(a: int, b: int) -> tuple[bool, int, float, Indices, Floats]:
        count = min(b - a, room)
        return listed(a, b, np.empty(count, np.int32), np.empty(count, np.float32))

    if _pool is None:
        parts, at = [], 0
        for a in range(0, size, SLICE):  # each writes where the one before has ended
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
    """Put one part behind the other, as far as there is room; how many elements that are."""
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
