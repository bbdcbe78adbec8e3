"""Kernels that all codecs share: finite test, accumulation, gather and clear, put back, scatter.

Arrays are flat, contiguous float32; indices are int32, within bounds (decoders check them), and distinct within a call
unless said otherwise.  Equal to `reference.basic` bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import Floats, Indices, kernel
from thinwire.kernels.cpu._streams import WIDTH, stream_zeros
from thinwire.kernels.cpu._tiles import AHEAD, TILE, add_tile, prefetch

CACHED = 1 << 18  # elements that are worth having in the cache when they are cleared: what follows finds them there
_EXPONENT = np.int32(0x7F800000)  # all ones exactly for NaN and infinity
_EXPONENT_BF16 = np.int16(0x7F80)


@kernel
def all_finite(x: Floats) -> bool:
    """True when no element of x, float32 (n,), is NaN or infinite.  Memory: one read pass."""
    bits = x.view(np.int32)
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _EXPONENT)  # no early exit: it would stop the loop from being vectorised
    return bool(largest != _EXPONENT)


@kernel
def all_finite_bf16(bits: NDArray[np.int16]) -> bool:
    """True when no bfloat16 number with these bits, int16 (n,), is NaN or infinite.  Memory: one read pass."""
    largest = np.int16(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & _EXPONENT_BF16)
    return bool(largest != _EXPONENT_BF16)


@kernel
def accumulate(residual: Floats, gradient: Floats) -> bool:
    """`residual += gradient`, both float32 (n,), tile by tile; a tile whose sum is not finite stays as it was.

    True when every tile was added.  Memory: one pass (2 reads, 1 write).
    """
    before = np.empty(TILE, np.float32)
    finite = True
    for tile in range(0, residual.size, TILE):
        finite &= add_tile(residual, gradient, tile, before)
    return finite


@kernel
def take(residual: Floats, indices: Indices, values: Floats) -> None:
    """`values[i] = residual[indices[i]]`, and zero there.

    residual float32 (n,), indices int32 (k,), values float32 (k,).  Memory: k cache lines read and written.
    """
    last = indices.size - 1
    for i in range(indices.size):
        prefetch(residual, indices[min(i + AHEAD, last)])
        j = indices[i]
        values[i] = residual[j]
        residual[j] = np.float32(0.0)


@kernel
def put_back(residual: Floats, indices: Indices, values: Floats) -> None:
    """`residual[indices[i]] += values[i]`; what `take` took, or the part of it that was not sent.

    residual float32 (n,), indices int32 (k,), values float32 (k,).  Memory: k cache lines read and written.
    """
    for i in range(indices.size):
        residual[indices[i]] += values[i]


@kernel
def clear(out: Floats) -> None:
    """Zero everywhere.  Memory: one write pass.

    An ordinary store reads the cache line that it overwrites: 25 M elements took 6.7 ms that way and 3.4 ms with
    non-temporal stores, against 9.4 ms for `add_`.
    """
    head = (-(out.ctypes.data // 4)) % WIDTH if out.size > CACHED else out.size
    for i in range(head):
        out[i] = np.float32(0.0)
    whole = out.size - (out.size - head) % WIDTH
    for i in range(head, whole, WIDTH):
        stream_zeros(out, i)
    for i in range(whole, out.size):
        out[i] = np.float32(0.0)


@kernel
def write_at(out: Floats, indices: Indices, values: Floats, scale: float) -> None:
    """Zero everywhere, then `out[indices[i]] = values[i] * scale`.

    out float32 (n,), indices int32 (k,), values float32 (k,).  Memory: one write pass and k cache lines.
    """
    clear(out)
    factor, last = np.float32(scale), indices.size - 1
    for i in range(indices.size):
        prefetch(out, indices[min(i + AHEAD, last)])
        out[indices[i]] = values[i] * factor
