"""Blocks of bytes with one scale each: accumulate, measure and round in one pass, add messages up.

residual, gradient and out are flat, contiguous float32 (n,).  Block b covers [starts[b], stops[b]) of them, and bytes
[places[b], places[b] + stops[b] - starts[b]) of codes, uint8, each an int8 in two's complement; scales float32 (blocks,).
Equal to `reference.int8` bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import kernel

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_LEVELS = np.float32(127.0)
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # below, its reciprocal would overflow
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0.0))  # 127 times it is finite
_ROUND = np.float32(1.5 * 2**23)  # adding it leaves a whole number, to nearest, ties to even, in the low bits
_ROUND_BITS = np.float32(1.5 * 2**23).view(np.int32)


@kernel
def encode(
    residual: Floats, gradient: Floats, starts: Places, stops: Places, places: Places, scales: Floats, codes: Bytes
) -> bool:
    """`residual += gradient`, then take from each block codes * scale out of it; scale is the largest magnitude / 127.

    A block whose sum is not finite stays as it was, with scale 0 and codes 0; so does one with a denormal scale, which
    is added.  True when every block was finite.  Memory: one pass (2 reads, 1 write) and a byte an element; the second
    loop finds its block in the cache.
    """
    finite = True
    for b in range(starts.size):
        r = residual[starts[b] : stops[b]]
        g = gradient[starts[b] : stops[b]]
        q = codes[places[b] : places[b] + r.size]
        largest = np.int32(0)
        for i in range(r.size):
            largest = max(largest, np.float32(r[i] + g[i]).view(np.int32) & _MAGNITUDE)
        good = bool(largest < _INFINITE)
        scale = min(np.int32(largest).view(np.float32) / _LEVELS, _LARGEST_SCALE) if good else np.float32(0.0)
        if scale < _SMALLEST_SCALE:
            scales[b] = np.float32(0.0)
            q[:] = 0
            finite &= good
            if good:
                for i in range(r.size):
                    r[i] += g[i]
            continue
        scales[b] = scale
        per_scale = np.float32(1.0) / scale
        for i in range(r.size):
            x = r[i] + g[i]
            shifted = np.float32(x * per_scale + _ROUND)
            q[i] = np.uint8(shifted.view(np.int32) - _ROUND_BITS)
            r[i] = x - (shifted - _ROUND) * scale
    return finite


@kernel
def add(
    out: Floats,
    starts: Places,
    stops: Places,
    places: Places,
    scales: Floats,
    codes: Bytes,
    factor: float,
    first: int,
    last: int,
) -> None:
    """`out += (code * scale) * factor` in float32, each product rounded, for blocks [first, last).

    Memory: one pass over out (1 read, 1 write) and a byte an element.
    """
    times = np.float32(factor)
    signed = codes.view(np.int8)
    for b in range(first, last):
        x = out[starts[b] : stops[b]]
        q = signed[places[b] : places[b] + x.size]
        scale = scales[b]
        for i in range(x.size):
            x[i] += np.float32(q[i]) * scale * times
