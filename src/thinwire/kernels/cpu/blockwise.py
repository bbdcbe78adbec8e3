"""Block-wise quantisation: accumulate, measure and round each block in one pass; add messages up.

residual, gradient and out are flat, contiguous float32 (n,).  blocks int64 (blocks, 3): block b covers elements
[blocks[b, 0], blocks[b, 1]), its codes begin at byte blocks[b, 2] of codes, uint8.  scales float32 (blocks,).
`bits` per element are

    8   an int8 in two's complement, times the scale: the largest magnitude of the block / 127
    1   the sign, set when negative, times the scale: the mean magnitude, a float64 sum in 64 partial sums; element i of
        a block is bit i % 8, from the lowest, of byte i // 8, and unused bits are zero

Equal to `reference.blockwise` bit for bit.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.cpu._jit import Bytes, Doubles, Floats, Offsets, kernel
from thinwire.kernels.cpu._llvm import I32, I64, floats, pointer, splat

LANES = 64
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITE = np.int32(0x7F800000)
_LEVELS = np.float32(127.0)
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # below, its reciprocal would overflow
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / _LEVELS, np.float32(0.0))  # 127 times it is finite
_ROUND = np.float32(1.5 * 2**23)  # adding it leaves a whole number, to nearest, ties to even, in the low bits
_ROUND_BITS = np.float32(1.5 * 2**23).view(np.int32)
_INTS, _FLOATS = ir.VectorType(I32, LANES), floats(LANES)


def _load(builder: Any, place: Any, align: int) -> Any:
    """LLVM would take the alignment of the whole vector for granted."""
    block = builder.load(place)
    block.align = align
    return block


def _word(context: Any, builder: Any, kind: Any, codes: Any, start: Any) -> Any:
    """Where the bits of the 64 places from `start` on lie."""
    byte = builder.udiv(start, I64(8))
    return pointer(context, builder, kind, codes, byte, I64)


def _take_with_signs(_context: Any, out: Any, other: Any, codes: Any, _start: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, other, codes, start, value = arguments
        place = pointer(context, builder, signature.args[0], array, start, _FLOATS)
        second = pointer(context, builder, signature.args[1], other, start, _FLOATS)
        total = builder.fadd(_load(builder, place, 4), _load(builder, second, 4))
        wide = splat(builder, value, _FLOATS)
        negative = builder.icmp_signed("<", builder.bitcast(total, _INTS), ir.Constant(_INTS, [0] * LANES))
        rest = builder.fsub(total, builder.select(negative, builder.fneg(wide), wide))
        builder.store(rest, place).align = 4
        word = _word(context, builder, signature.args[2], codes, start)
        builder.store(builder.bitcast(negative, I64), word).align = 1
        return context.get_dummy_value()

    return types.void(out, other, codes, types.intp, types.float32), generate


def _add_with_signs(_context: Any, out: Any, codes: Any, _start: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, codes, start, value = arguments
        wide = splat(builder, value, _FLOATS)
        word = _load(builder, _word(context, builder, signature.args[1], codes, start), 1)
        negative = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
        place = pointer(context, builder, signature.args[0], array, start, _FLOATS)
        total = builder.fadd(_load(builder, place, 4), builder.select(negative, builder.fneg(wide), wide))
        builder.store(total, place).align = 4
        return context.get_dummy_value()

    return types.void(out, codes, types.intp, types.float32), generate


take_signed: Callable[[Floats, Floats, Bytes, int, np.float32], None] = cast(Any, intrinsic(_take_with_signs))
"""`take_signed(r, g, codes, start, value)`, for 64 places from `start`, a multiple of 8, on: with x = r + g, r = x - value,
or x + value where x has its sign bit set, which is what the bits of codes say from now on."""

add_signed: Callable[[Floats, Bytes, int, np.float32], None] = cast(Any, intrinsic(_add_with_signs))
"""`add_signed(x, codes, start, value)`, for 64 places: x -= value where the bit is set, += value elsewhere."""


@kernel
def _mean(r: Floats, g: Floats, lanes: Doubles) -> tuple[bool, np.float32]:
    """Whether r + g is finite, and the mean of its magnitudes.  In float64 a sum of finite float32 is finite."""
    lanes[:] = 0.0
    whole = r.size - r.size % LANES
    for row in range(0, whole, LANES):
        r_row = r[row : row + LANES]
        g_row = g[row : row + LANES]
        for lane in range(LANES):
            lanes[lane] += np.float64(abs(r_row[lane] + g_row[lane]))
    for lane in range(r.size - whole):
        lanes[lane] += np.float64(abs(r[whole + lane] + g[whole + lane]))
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return bool(np.isfinite(total)), np.float32(total / r.size)


@kernel
def _encode_signs(r: Floats, g: Floats, q: Bytes, lanes: Doubles) -> tuple[bool, np.float32]:
    good, scale = _mean(r, g, lanes)
    if not good:
        q[:] = 0
        return False, np.float32(0.0)
    whole = r.size - r.size % LANES
    for row in range(0, whole, LANES):
        take_signed(r, g, q, row, scale)
    q[whole // 8 :] = 0
    for i in range(whole, r.size):
        x = r[i] + g[i]
        negative = np.float32(x).view(np.int32) < 0
        q[i // 8] |= np.uint8(negative) << (i % 8)
        r[i] = x + scale if negative else x - scale
    return True, scale


@kernel
def _encode_levels(r: Floats, g: Floats, q: Bytes) -> tuple[bool, np.float32]:
    largest = np.int32(0)
    for i in range(r.size):
        largest = max(largest, np.float32(r[i] + g[i]).view(np.int32) & _MAGNITUDE)
    good = bool(largest < _INFINITE)
    scale = min(np.int32(largest).view(np.float32) / _LEVELS, _LARGEST_SCALE) if good else np.float32(0.0)
    if scale < _SMALLEST_SCALE:
        q[:] = 0
        if good:
            for i in range(r.size):
                r[i] += g[i]
        return good, np.float32(0.0)
    per_scale = np.float32(1.0) / scale
    for i in range(r.size):
        x = r[i] + g[i]
        shifted = np.float32(x * per_scale + _ROUND)
        q[i] = np.uint8(shifted.view(np.int32) - _ROUND_BITS)
        r[i] = x - (shifted - _ROUND) * scale
    return True, scale


@kernel
def encode(residual: Floats, gradient: Floats, blocks: Offsets, scales: Floats, codes: Bytes, bits: int) -> bool:
    """`residual += gradient`, then take code * scale of each block out of it; True when every block was finite.

    A block whose sum is not finite stays as it was, with scale 0 and codes 0; so does one with a denormal scale for 8
    bits, which is added.  Memory: one pass (2 reads, 1 write) and the codes; the second loop over a block finds it in
    the cache.
    """
    finite = True
    lanes = np.zeros(LANES, np.float64)
    for b in range(scales.size):
        start, stop, place = blocks[b, 0], blocks[b, 1], blocks[b, 2]
        r, g = residual[start:stop], gradient[start:stop]
        q = codes[place : place + (r.size * bits + 7) // 8]
        good, scales[b] = _encode_signs(r, g, q, lanes) if bits == 1 else _encode_levels(r, g, q)
        finite &= good
    return finite


@kernel
def add(out: Floats, blocks: Offsets, scales: Floats, codes: Bytes, factor: float, bits: int) -> None:
    """`out += code * scale * factor` in float32: (code * scale) * factor for 8 bits, sign * (scale * factor) for 1.

    Memory: one pass over out (1 read, 1 write) and the codes.
    """
    times = np.float32(factor)
    for b in range(scales.size):
        x = out[blocks[b, 0] : blocks[b, 1]]
        place, scale = blocks[b, 2], scales[b]
        q = codes[place : place + (x.size * bits + 7) // 8]
        if bits == 1:
            value = scale * times
            whole = x.size - x.size % LANES
            for row in range(0, whole, LANES):
                add_signed(x, q, row, value)
            for i in range(whole, x.size):
                x[i] += -value if q[i // 8] >> (i % 8) & 1 else value
        else:
            levels = q.view(np.int8)
            for i in range(x.size):
                x[i] += np.float32(levels[i]) * scale * times
