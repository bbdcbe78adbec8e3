"""MiCRO: accumulate everywhere, select in one partition, in one pass over memory.

Arrays are flat and contiguous; residual and gradient float32 (n,).  Equal to `reference.micro` bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import kernel
from thinwire.kernels.cpu._masks import BLOCK, ONE, block_mask, count_bits, lowest_bit
from thinwire.kernels.cpu._tiles import TILE, add_tile

Floats = NDArray[np.float32]
Indices = NDArray[np.int32]
Words = NDArray[np.int32]
Offsets = NDArray[np.int64]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_TWO, _BLOCK = np.uint64(2), np.uint64(BLOCK)


@kernel
def _select(bits: Words, first: int, last: int, threshold: np.int32, start: int, indices: Indices, wanted: int) -> int:
    """Append the places in [first, last) whose magnitude reaches the threshold; the new number wanted."""
    room = np.uint64(indices.size)
    for place in range(first, last, BLOCK):
        if place + BLOCK > bits.size:
            for i in range(place, last):
                if bits[i] & _MAGNITUDE >= threshold:
                    if wanted < indices.size:
                        indices[wanted] = i - start
                    wanted += 1
            break
        mask = block_mask(bits, place, threshold)
        if place + BLOCK > last:
            mask &= (ONE << np.uint64(last - place)) - ONE
        base = np.int32(place - start)
        at = np.uint64(wanted)  # unsigned: no test for a negative index
        wanted += count_bits(mask)
        if at + _BLOCK <= room:
            # Two stores whether or not there is something to store: a branch on "0, 1 or 2 of 64" is guessed wrong too
            # often.  What they write too much is overwritten by the next block or lies beyond the written count.
            indices[at] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            indices[at + ONE] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            at += _TWO
        while mask != 0 and at < room:
            indices[at] = base + np.int32(lowest_bit(mask))
            mask &= mask - ONE
            at += ONE
    return wanted


@kernel
def accumulate_select_segments(
    residual: Floats, gradient: Floats, start: int, stop: int, ends: Offsets, thresholds: Floats, indices: Indices
) -> tuple[bool, int, int]:
    """`residual += gradient`; then the places in [start, stop) with `|residual| >= threshold`, never a zero.

    ends int64 (s,), ascending, and thresholds float32 (s,), s >= 1: segment i covers [ends[i - 1], ends[i]), the first
    one from 0 on, the last one as far as needed.  indices int32 (capacity,) receives ascending places relative to
    start; what lies behind the written ones is undefined.  Returns (finite, wanted, written): wanted counts on when
    indices is full.  A tile of 4096 whose sum is not finite is not added, and makes finite False.

    Memory: one pass (2 reads, 1 write); selection finds its tile in the cache.
    """
    finite = True
    wanted = 0
    segment = 0
    bits = residual.view(np.int32)
    limits = thresholds.view(np.int32)
    before = np.empty(TILE, np.float32)
    for tile in range(0, residual.size, TILE):
        end = min(tile + TILE, residual.size)
        finite &= add_tile(residual, gradient, tile, before)
        first = max(tile, start)
        last = min(end, stop)
        while first < last:
            while segment + 1 < ends.size and ends[segment] <= first:
                segment += 1
            border = last if segment + 1 == ends.size else min(last, ends[segment])
            threshold = max(limits[segment], np.int32(1))  # 1 is the smallest denormal: zeros are never selected
            wanted = _select(bits, first, border, threshold, start, indices, wanted)
            first = border
    return finite, wanted, min(wanted, indices.size)
