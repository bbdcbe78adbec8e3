"""Top-k by threshold: search for the threshold in few passes (`docs/methods/laplace.md`).

The usual step is one streaming pass: with the threshold of the step before, `accumulate_take` adds the gradient and takes
what lies above it, tile by tile; if the count is within the tolerance, the step is done.  If the threshold moves too fast for
that, and for exact selection, it is lowered a little, and `accumulate_collect` keeps a short list of candidates; the rest
happens on that list.  Only the first step, and one whose list is too short or too long, reads the vector again.  Every search
terminates: after `MAX_PASSES` counting passes it continues on the bits of the magnitudes, at most three passes for any data.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu import laplace, laplace_fit, sliced

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]

MAX_PASSES = 6
_BINS = 2048  # 11 of the 31 bits of a magnitude at a time
_LARGEST = float(np.finfo(np.float32).max)
_LISTED = 2.0  # candidates aimed at, as a multiple of k
_SURE = 0.6  # share of the tolerance within which a guess must have been for the next one to be trusted
_TREND = 0.5  # weight of the last step in the drift


class Warm(NamedTuple):
    """Search state carried to the next step; the default is a cold start."""

    threshold: float = 0.0  # the best guess of the threshold for exactly k
    tail: float = 0.0  # how much lower the threshold for e k is: the scale of the tail there; 0 is cold
    k: int = 0
    drift: float = 0.0  # recent rise of the threshold per step
    steady: bool = False  # whether the guess for the last step was good enough


class Cut(NamedTuple):
    """Select |x| > threshold and the first `ties` of those equal to it: `selected` places, found in so many passes."""

    threshold: float
    ties: int
    selected: int
    passes: int
    fitted: laplace_fit.Fitted | None = None
    """How magnitudes are distributed, where a cold start looked."""


class Picked(NamedTuple):
    """What `accumulate_pick` did; the first `taken` entries of its buffers are valid."""

    finite: bool
    taken: int
    warm: Warm
    passes: int  # over the whole vector, in addition to the one that accumulates
    rounded: bool = (
        False  # whether values are rounded by the coding already, and the rounding error is in the residual
    )
    fitted: laplace_fit.Fitted | None = None  # how magnitudes were distributed, after a cold start


def accumulate_pick(
    residual: Floats,
    gradient: Floats,
    k: int,
    warm: Warm,
    indices: Indices,
    values: Floats,
    tolerance: float = 0.2,
    exact: bool = False,
    coding: int = 1,
) -> Picked:
    """`residual += gradient`, then move about k of its largest magnitudes to `indices` and `values`, ascending.

    residual and gradient float32 (n,); indices int32 and values float32 (capacity,).  The count lies in
    [(1 - tolerance) k, (1 + tolerance) k].  It is exactly k where ties allow no such threshold, and with `exact`; both
    take the lowest index first among equals.  It is the number of non-zeros where there are no more.  The capacity
    must hold that count; with 8 k a second pass over the vector is rare, with n it never happens.  When the sum is not
    finite nothing is taken and `warm` stays.  If the first guess is accepted, values are rounded as `coding` sends them.

    Memory: one pass when warm (2 reads, 1 write), and `taken` cache lines if the first guess is rejected; each of `passes`
    reads the vector once more.
    """
    low = k if exact else max(1, math.ceil((1.0 - tolerance) * k))
    high = k if exact else math.floor((1.0 + tolerance) * k)
    room = indices.size
    if room < min(high, residual.size) or values.size != room:
        raise ValueError(f"buffers of {room} indices and {values.size} values for {high} of {residual.size} elements")
    if k <= 0:
        return Picked(sliced.accumulate(residual, gradient), 0, warm, 0)

    # For a search of the vector: exact selection needs a list to choose from, otherwise a threshold is enough.
    window = (k, min(2 * k, room)) if exact else (low, high)
    cut = listed = None
    if residual.size <= room or warm.tail > 0.0:
        if residual.size > room and warm.steady and warm.k == k and not exact:
            bottom = _rounded(_expected(warm))
            done, finite, wanted, excess = sliced.accumulate_take(
                residual, gradient, bottom, window, coding, indices, values
            )
            if done:
                return Picked(True, wanted, _follow(warm, wanted, bottom), 0, rounded=True)
        else:
            bottom = 0.0 if residual.size <= room else _below(warm, k)
            finite, wanted, excess = sliced.accumulate_collect(residual, gradient, bottom, indices, values)
        listed = Cut(bottom, 0, wanted, 0)
        if finite and (wanted > room or (wanted < low and bottom > 0.0)):
            cut = _search_again(residual, k, window, listed, excess / max(1, min(wanted, room)))
    else:
        finite, total, largest, nonzero = laplace.accumulate_measure(residual, gradient)
        if finite:
            cut = _search_cold(residual, k, window, total, largest, nonzero)
    if not finite:
        return Picked(False, 0, warm, 0)

    passes, fitted = 0, None
    if cut is not None:
        fitted = cut.fitted
        wanted, excess = laplace.collect(residual, cut.threshold, cut.ties, indices, values)
        bottom = cut.threshold
        passes = cut.passes + 1
    indices, values = indices[:wanted], values[:wanted]
    if wanted <= high:
        ties = cut.ties if cut is not None else 0
        cut = Cut(bottom, ties, wanted, 0)
    elif exact:
        cut = exact_cut(values, k)
    else:
        start = bottom + excess / wanted * math.log(wanted / k)
        cut = search(values, k, window, bottom, _LARGEST, start)
    taken, excess = laplace.take_above(residual, indices, values, cut.threshold, cut.ties)
    warm = _keep(warm, k, taken, cut.threshold, excess, listed, tolerance)
    return Picked(True, taken, warm, passes, fitted=fitted)


def _expected(warm: Warm) -> float:
    return max(0.0, warm.threshold + warm.drift)


def _follow(warm: Warm, taken: int, threshold: float) -> Warm:
    """The threshold was accepted: correct it for the next step along the slope of the last list.

    By half of what the slope suggests, and the slope itself by the square root of the change: an outdated slope would
    otherwise make the count oscillate. If it is still too wrong the count misses the window, and there is a new list.
    """
    guess = max(0.0, threshold + 0.5 * warm.tail * math.log(taken / warm.k))
    tail = warm.tail * math.sqrt(guess / warm.threshold) if guess > 0.0 < warm.threshold else warm.tail
    return Warm(guess, tail, warm.k, _drift(warm, guess), True)


def _drift(warm: Warm, guess: float) -> float:
    """Expected rise of the threshold in the next step: an average over the last ones."""
    return warm.drift + _TREND * (guess - warm.threshold - warm.drift)


def _below(warm: Warm, k: int) -> float:
    """Threshold of the list: somewhat more than k elements should lie above it."""
    return _rounded(max(0.0, _expected(warm) + warm.tail * math.log(warm.k / (_LISTED * k))))


def _keep(
    warm: Warm, k: int, taken: int, threshold: float, excess: float, listed: Cut | None, tolerance: float
) -> Warm:
    """State for the next step: the scale of the tail from two counts if there are two, else from the mean excess.

    The mean excess is the scale of the whole tail above the threshold; with heavy tails a few large values dominate it, and
    lists would become several times too long.
    """
    if taken == 0:
        return Warm()
    tail = excess / taken
    if listed is not None and listed.selected > 0:
        ratio = math.log(listed.selected / taken)
        if abs(ratio) > 0.1:
            tail = (threshold - listed.threshold) / ratio
    guess = max(0.0, threshold + tail * math.log(taken / k))
    if warm.k != k or tail <= 0.0:
        return Warm(guess, tail, k)
    missed = abs(guess - _expected(warm)) / tail  # logarithm of the factor by which the count at the guess deviated
    return Warm(guess, tail, k, _drift(warm, guess), missed < _SURE * math.log1p(tolerance))


def _search_cold(x: Floats, k: int, window: tuple[int, int], total: float, largest: float, nonzero: int) -> Cut:
    """Start at the threshold of the model that fits best, in the bin of the histogram that the right one lies in."""
    counts = laplace_fit.count(x)
    fitted = None if counts is None else laplace_fit.fit(counts)
    if nonzero <= k:
        return Cut(0.0, 0, nonzero, 1, fitted)
    if counts is None or fitted is None or fitted.nonzero <= k:  # hardly anything but zeros
        return search(x, k, window, 0.0, largest, total / nonzero * math.log(nonzero / k))
    reached = np.cumsum(counts[::-1])[::-1]  # reached[i]: magnitudes in bin i or higher
    chosen = int(np.flatnonzero(reached >= k)[-1])
    higher = int(reached[chosen + 1]) if chosen + 1 < counts.size else 0
    lo, hi = laplace_fit.EDGES[chosen], min(laplace_fit.EDGES[chosen + 1], largest)
    start = fitted.best.model.threshold(k / fitted.nonzero)
    if not lo < start < hi:  # the model is wrong there: as if the tail were exponential within the bin
        start = lo + (hi - lo) * math.log(reached[chosen] / k) / math.log(reached[chosen] / max(higher, 0.5))
    lowest = _magnitude(_bits(lo) - 1)
    cut = search(x, k, window, lowest, hi, start)
    return cut._replace(passes=cut.passes + 1, fitted=fitted)


def _search_again(x: Floats, k: int, window: tuple[int, int], seen: Cut, tail: float) -> Cut:
    """After a list that was too long or too short: correct its threshold, or start cold if it was far too short or long."""
    if k <= 4 * seen.selected <= 64 * k:
        start = seen.threshold + tail * math.log(seen.selected / k)
        lo, hi = (seen.threshold, _LARGEST) if seen.selected > k else (0.0, seen.threshold)
        return search(x, k, window, lo, hi, start)
    cut = _search_cold(x, k, window, *laplace.measure(x))
    return cut._replace(passes=cut.passes + 1)


def search(x: Floats, k: int, window: tuple[int, int], lo: float, hi: float, start: float) -> Cut:
    """A threshold between lo and hi whose count lies in the window, which holds k.

    Bracketed: more than k magnitudes lie above lo, fewer than k above hi.  Each count corrects the threshold as if the
    tail above it were exponential with the mean excess as its scale (its maximum-likelihood estimate); bisection where
    that leaves the bracket.
    """
    low, high = window
    target = math.sqrt(low * high)
    threshold = start
    passes = 0
    ends = (x.size, -1)  # counts above lo and hi; lo = 0 may have fewer, hi is not known
    while passes < MAX_PASSES:
        threshold = _rounded(threshold)
        if not lo < threshold < hi:
            threshold = _rounded(lo + (hi - lo) / 2.0)
            if not lo < threshold < hi:
                break
        count, excess = laplace.count_above(x, threshold)
        passes += 1
        if low <= count <= high:
            return Cut(threshold, 0, count, passes)
        repeated = count in ends
        if count > k:
            lo, ends = threshold, (count, ends[1])
        else:
            hi, ends = threshold, (ends[0], count)
        if repeated:
            break  # nothing lies between here and an end: ties or outliers, which the search by bits resolves
        threshold = threshold + excess / count * math.log(count / target) if count else lo
    cut = search_bits(x, k, window, lo, hi)
    return cut._replace(passes=cut.passes + passes)


def search_bits(x: Floats, k: int, window: tuple[int, int], lo: float, hi: float) -> Cut:
    """The same by the bits of the magnitudes, 11 at a time: at most three passes, exactly k if nothing fits."""
    low, high = window
    first, last = _bits(lo) + 1, _bits(hi)
    counts = np.empty(_BINS, np.int64)
    for passes in range(1, 4):
        shift = max(0, (last - first).bit_length() - 11)
        above = laplace.histogram(x, first, shift, counts)
        reached = above + np.cumsum(counts[::-1])[::-1]  # reached[i]: magnitudes in bin i or higher
        inside = np.flatnonzero(reached >= k)
        if inside.size == 0:  # fewer than k above lo, which only lo = 0 allows: all non-zeros
            return Cut(lo, 0, int(reached[0]), passes)
        chosen = int(inside[-1])
        higher = int(reached[chosen + 1]) if chosen + 1 < _BINS else above
        first += chosen << shift
        if low <= reached[chosen] <= high:
            return Cut(_magnitude(first - 1), 0, int(reached[chosen]), passes)
        if low <= higher <= high:
            return Cut(_magnitude(first + (1 << shift) - 1), 0, higher, passes)
        if shift == 0:
            return Cut(_magnitude(first), k - higher, k, passes)
        last = first + (1 << shift) - 1
    raise AssertionError("31 bits are three times 11 at most")


def exact_cut(x: Floats, k: int) -> Cut:
    """The cut that selects exactly k of a short x float32 (m,), m >= k, the first ones among equals."""
    magnitudes = np.abs(x)
    threshold = np.partition(magnitudes, x.size - k)[x.size - k]
    return Cut(float(threshold), k - int(np.count_nonzero(magnitudes > threshold)), k, 0)


def _rounded(threshold: float) -> float:
    return float(np.float32(min(max(threshold, -_LARGEST), _LARGEST)))


def _bits(magnitude: float) -> int:
    return int(np.float32(magnitude).view(np.int32))


def _magnitude(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))
