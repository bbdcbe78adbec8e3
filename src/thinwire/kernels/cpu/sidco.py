"""SIDCo: statistics of the magnitudes above a threshold, for one stage.

Arrays are flat and contiguous float32.  Float sums are float64, tile by tile of 4096 in order, with 64 partial sums
within a tile; equal to `reference.sidco` bit for bit.
"""

import numpy as np

from thinwire.kernels.cpu._jit import Floats, kernel

TILE = 4096
LANES = 64
_MAGNITUDE = np.int32(0x7FFFFFFF)


@kernel
def tail(x: Floats, threshold: float) -> tuple[int, float, float]:
    """Of the |x| > threshold: how many, their sum, the smallest; (0, 0.0, infinity) when there is none.

    x float32 (n,) without NaN, threshold a float32 value, 0 or more.  Memory: one read pass, without branches: a quarter
    of the elements is above the first threshold.
    """
    bits = x.view(np.int32)
    limit = np.float32(threshold).view(np.int32)
    sums = np.zeros(LANES, np.float64)
    smallest = np.full(1, np.float32(np.inf).view(np.int32), np.int32)
    count = 0
    total = 0.0
    for tile in range(0, x.size, TILE):
        part = bits[tile : tile + TILE]
        tile_count = np.int32(0)
        least = smallest[0]
        for i in range(part.size):
            magnitude = part[i] & _MAGNITUDE
            above = magnitude > limit
            tile_count += np.int32(above)
            least = min(least, magnitude if above else _MAGNITUDE)
        smallest[0] = least
        count += int(tile_count)
        sums[:] = 0.0
        values = x[tile : tile + TILE]
        whole = values.size - values.size % LANES
        for row in range(0, whole, LANES):
            block = values[row : row + LANES]
            for lane in range(LANES):
                magnitude_ = abs(block[lane])
                sums[lane] += np.float64(magnitude_ if magnitude_ > np.float32(threshold) else np.float32(0.0))
        for lane in range(values.size - whole):
            magnitude_ = abs(values[whole + lane])
            sums[lane] += np.float64(magnitude_ if magnitude_ > np.float32(threshold) else np.float32(0.0))
        tile_total = 0.0
        for lane in range(LANES):
            tile_total += sums[lane]
        total += tile_total
    return count, total, np.float64(smallest.view(np.float32)[0])
