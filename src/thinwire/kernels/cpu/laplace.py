"""Top-k by threshold: the passes that measure, count, collect candidates and take the chosen ones.

Arrays are flat and contiguous, residual, gradient and x float32 (n,), without NaN or infinity in what is stored.  A
place is selected when |x| > threshold; zeros never are.  Magnitudes are compared by their bits, which have the same
order.  Float sums are float64, tile by tile of 4096 in order; equal to `reference.laplace` bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._halves import FP32, narrow, widen
from thinwire.kernels.cpu._jit import kernel
from thinwire.kernels.cpu._masks import BLOCK, ONE, block_mask, count_bits, lowest_bit
from thinwire.kernels.cpu._tiles import TILE, add_tile

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.int32]
Words = NDArray[np.int32]
Counts = NDArray[np.int64]

LANES = 64  # independent partial sums, so that the sum of a tile is vectorised in an order that is written down
_MAGNITUDE = np.int32(0x7FFFFFFF)
_TWO, _THREE, _BLOCK = np.uint64(2), np.uint64(3), np.uint64(BLOCK)


@kernel
def _measure_tile(x: Floats, lanes: Doubles) -> tuple[float, np.int32, int]:
    """Sum of magnitudes, largest magnitude as bits, number of non-zeros."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    nonzero = np.int32(0)
    for i in range(x.size):
        magnitude = bits[i] & _MAGNITUDE
        largest = max(largest, magnitude)
        nonzero += np.int32(magnitude != 0)
    lanes[:] = 0.0
    whole = x.size - x.size % LANES
    for row in range(0, whole, LANES):
        part = x[row : row + LANES]
        for lane in range(LANES):
            lanes[lane] += np.float64(abs(part[lane]))
    for lane in range(x.size - whole):
        lanes[lane] += np.float64(abs(x[whole + lane]))
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total, largest, int(nonzero)


@kernel
def accumulate_measure(residual: Floats, gradient: Floats) -> tuple[bool, float, float, int]:
    """`residual += gradient` as `basic.accumulate` does, and of the result (finite, sum |x|, max |x|, non-zeros).

    Memory: one pass (2 reads, 1 write).
    """
    lanes = np.zeros(LANES, np.float64)
    largest = np.zeros(1, np.int32)
    finite = True
    total = 0.0
    nonzero = 0
    before = np.empty(TILE, np.float32)
    for tile in range(0, residual.size, TILE):
        finite &= add_tile(residual, gradient, tile, before)
        tile_total, tile_largest, tile_nonzero = _measure_tile(residual[tile : tile + TILE], lanes)
        total += tile_total
        largest[0] = max(largest[0], tile_largest)
        nonzero += tile_nonzero
    return finite, total, np.float64(largest.view(np.float32)[0]), nonzero


@kernel
def measure(x: Floats) -> tuple[float, float, int]:
    """(sum |x|, max |x|, non-zeros).  Memory: one read pass."""
    lanes = np.zeros(LANES, np.float64)
    largest = np.zeros(1, np.int32)
    total = 0.0
    nonzero = 0
    for tile in range(0, x.size, TILE):
        tile_total, tile_largest, tile_nonzero = _measure_tile(x[tile : tile + TILE], lanes)
        total += tile_total
        largest[0] = max(largest[0], tile_largest)
        nonzero += tile_nonzero
    return total, np.float64(largest.view(np.float32)[0]), nonzero


@kernel
def _select_tile(bits: Words, tile: int, above: np.int32, indices: Indices, wanted: int) -> int:
    """Append the places of one tile whose magnitude has at least the bits `above`; the new number wanted."""
    end = min(tile + TILE, bits.size)
    at, room = np.uint64(wanted), np.uint64(indices.size)  # unsigned: no test for a negative index
    for place in range(tile, end, BLOCK):
        if place + BLOCK <= bits.size:
            mask = block_mask(bits, place, above)
        else:
            mask = np.uint64(0)
            for i in range(place, end):
                mask |= np.uint64(bits[i] & _MAGNITUDE >= above) << np.uint64(i - place)
        base = np.int32(place)
        total = at + np.uint64(count_bits(mask))
        if at + _BLOCK <= room:
            # Three stores whether or not there is something to store: a branch on "0, 1, 2 or 3 of 64" is guessed
            # wrong too often.  What they write too much is overwritten later or lies beyond the written count.
            indices[at] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            indices[at + ONE] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            indices[at + _TWO] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            at += _THREE
        while mask != 0 and at < room:
            indices[at] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            at += ONE
        at = total
    return np.int64(at)  # type: ignore[return-value]


@kernel
def _collect_tile(
    x: Floats, tile: int, threshold: float, indices: Indices, values: Floats, wanted: int
) -> tuple[int, float]:
    """Append the places of one tile above the threshold, with their values; (new number wanted, excess written)."""
    above = np.float32(threshold).view(np.int32) + np.int32(1)
    total = _select_tile(x.view(np.int32), tile, above, indices, wanted)
    excess = 0.0
    for i in range(wanted, min(total, indices.size)):
        value = x[indices[i]]
        values[i] = value
        excess += np.float64(abs(value)) - threshold
    return total, excess


@kernel
def accumulate_collect(
    residual: Floats, gradient: Floats, threshold: float, indices: Indices, values: Floats
) -> tuple[bool, int, float]:
    """`residual += gradient` as `basic.accumulate` does, and collect the candidates `|residual| > threshold`.

    indices int32 (capacity,), ascending, and values float32 (capacity,); nothing is cleared.  threshold is a float32
    value, 0 or more.  Returns (finite, wanted, excess): wanted counts on when the buffers are full, excess is the sum
    of |x| - threshold over those written.  Memory: one pass (2 reads, 1 write); candidates come from the cache.
    """
    finite = True
    wanted = 0
    excess = 0.0
    before = np.empty(TILE, np.float32)
    for tile in range(0, residual.size, TILE):
        finite &= add_tile(residual, gradient, tile, before)
        wanted, tile_excess = _collect_tile(residual, tile, threshold, indices, values, wanted)
        excess += tile_excess
    return finite, wanted, excess


@kernel
def accumulate_take(
    residual: Floats, gradient: Floats, threshold: float, coding: int, indices: Indices, values: Floats
) -> tuple[bool, int, float]:
    """As `accumulate_collect`, but what is listed is taken at once, while its tile is in the cache.

    `values` are what the receiver will see under `coding` (1 fp32, 2 fp16, 3 bf16); the rounding stays in `residual`.  The
    excess is that of the elements themselves.  Memory: one pass (2 reads, 1 write).
    """
    finite = True
    wanted = 0
    excess = 0.0
    bits = residual.view(np.int32)
    above = np.float32(threshold).view(np.int32) + np.int32(1)
    before = np.empty(TILE, np.float32)
    for tile in range(0, residual.size, TILE):
        finite &= add_tile(residual, gradient, tile, before)
        total = _select_tile(bits, tile, above, indices, wanted)
        tile_excess = 0.0
        for i in range(wanted, min(total, indices.size)):
            value = residual[indices[i]]
            tile_excess += np.float64(abs(value)) - threshold
            sent = widen(narrow(value, coding), coding) if coding != FP32 else value
            values[i] = sent
            residual[indices[i]] = value - sent
        excess += tile_excess
        wanted = total
    return finite, wanted, excess


@kernel
def collect(x: Floats, threshold: float, ties: int, indices: Indices, values: Floats) -> tuple[int, float]:
    """The places with |x| > threshold, and among those with |x| == threshold the first `ties`: (wanted, excess).

    Buffers and results as for `accumulate_collect`; x is not changed.  Memory: one read pass.
    """
    bits = x.view(np.int32)
    exactly = np.float32(threshold).view(np.int32)
    wanted = 0
    excess = 0.0
    for tile in range(0, x.size, TILE):
        if ties == 0:
            wanted, tile_excess = _collect_tile(x, tile, threshold, indices, values, wanted)
            excess += tile_excess
        else:
            for i in range(tile, min(tile + TILE, x.size)):
                magnitude = bits[i] & _MAGNITUDE
                tie = magnitude == exactly and magnitude != 0 and ties > 0
                if tie or magnitude > exactly:
                    ties -= int(tie)
                    if wanted < indices.size:
                        indices[wanted] = i
                        values[wanted] = x[i]
                        excess += np.float64(abs(x[i])) - threshold
                    wanted += 1
    return wanted, excess


@kernel
def count_above(x: Floats, threshold: float) -> tuple[int, float]:
    """How many |x| > threshold, and the sum of |x| - threshold over them.  Memory: one read pass."""
    bits = x.view(np.int32)
    above = np.float32(threshold).view(np.int32) + np.int32(1)
    count = 0
    excess = 0.0
    for tile in range(0, x.size, TILE):
        tile_excess = 0.0
        end = min(tile + TILE, x.size)
        for place in range(tile, end, BLOCK):
            if place + BLOCK <= x.size:
                mask = block_mask(bits, place, above)
                count += count_bits(mask)
                while mask != 0:
                    tile_excess += np.float64(abs(x[place + lowest_bit(mask)])) - threshold
                    mask &= mask - ONE
            else:
                for i in range(place, end):
                    if bits[i] & _MAGNITUDE >= above:
                        count += 1
                        tile_excess += np.float64(abs(x[i])) - threshold
        excess += tile_excess
    return count, excess


@kernel
def histogram(x: Floats, first: int, shift: int, counts: Counts) -> int:
    """Count magnitudes by their bits: bin i has those in [first + (i << shift), first + ((i + 1) << shift)).

    counts int64 (bins,) is overwritten.  Returns how many lie above the last bin.  Memory: one read pass.
    """
    bits = x.view(np.int32)
    counts[:] = 0
    above = 0
    for i in range(x.size):
        key = (np.int64(bits[i] & _MAGNITUDE) - first) >> shift
        if key >= counts.size:
            above += 1
        elif key >= 0:
            counts[key] += 1
    return above


@kernel
def take_above(residual: Floats, indices: Indices, values: Floats, threshold: float, ties: int) -> tuple[int, float]:
    """Keep of the candidates those above the threshold, and the first `ties` of those at it; clear them in residual.

    indices int32 (m,) and values float32 (m,) are what `collect` wrote, and are compacted in place, in order.  Returns
    (kept, excess).  Memory: one pass over the candidates; `kept` cache lines of residual read and written.
    """
    bits = values.view(np.int32)
    exactly = np.float32(threshold).view(np.int32)
    kept = 0
    for i in range(values.size):
        magnitude = bits[i] & _MAGNITUDE
        tie = magnitude == exactly and ties > 0
        indices[kept] = indices[i]
        values[kept] = values[i]
        ties -= int(tie)
        kept += int(tie or magnitude > exactly)
    excess = 0.0
    for i in range(kept):
        residual[indices[i]] = np.float32(0.0)
        excess += np.float64(abs(values[i])) - threshold
    return kept, excess
