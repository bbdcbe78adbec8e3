"""Blocks of bits with one scale each: accumulate, measure and take in one pass, add messages up.

residual, gradient and out are flat, contiguous float32 (n,).  Block b covers [starts[b], stops[b]) of them; bit i % 8,
from the lowest, of byte places[b] + i // 8 of codes, uint8, is set when its element i is negative; unused bits are zero.
scales float32 (blocks,).  The mean is a float64 sum in 64 partial sums.  Equal to `reference.sign` bit for bit.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import kernel

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]

LANES = 64
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_INTS, _FLOATS = ir.VectorType(_I32, LANES), ir.VectorType(ir.FloatType(), LANES)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    wide = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(wide, undefined, ir.Constant(_INTS, [0] * LANES))


def _load(builder: Any, place: Any, align: int) -> Any:
    """LLVM would take the alignment of the whole vector for granted."""
    block = builder.load(place)
    block.align = align
    return block


def _word(context: Any, builder: Any, kind: Any, codes: Any, start: Any) -> Any:
    """Where the bits of the 64 places from `start` on lie."""
    byte = builder.udiv(start, _I64(8))
    return _pointer(context, builder, kind, codes, byte, _I64)


def _take_with_signs(_context: Any, out: Any, other: Any, codes: Any, _start: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, other, codes, start, value = arguments
        place = _pointer(context, builder, signature.args[0], array, start, _FLOATS)
        second = _pointer(context, builder, signature.args[1], other, start, _FLOATS)
        total = builder.fadd(_load(builder, place, 4), _load(builder, second, 4))
        wide = _splat(builder, value)
        negative = builder.icmp_signed("<", builder.bitcast(total, _INTS), ir.Constant(_INTS, [0] * LANES))
        rest = builder.fsub(total, builder.select(negative, builder.fneg(wide), wide))
        builder.store(rest, place).align = 4
        word = _word(context, builder, signature.args[2], codes, start)
        builder.store(builder.bitcast(negative, _I64), word).align = 1
        return context.get_dummy_value()

    return types.void(out, other, codes, types.intp, types.float32), generate


def _add_with_signs(_context: Any, out: Any, codes: Any, _start: Any, _value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, codes, start, value = arguments
        wide = _splat(builder, value)
        word = _load(builder, _word(context, builder, signature.args[1], codes, start), 1)
        negative = builder.bitcast(word, ir.VectorType(ir.IntType(1), LANES))
        place = _pointer(context, builder, signature.args[0], array, start, _FLOATS)
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
def encode(
    residual: Floats, gradient: Floats, starts: Places, stops: Places, places: Places, scales: Floats, codes: Bytes
) -> bool:
    """`residual += gradient`, then take from each block sign * scale out of it; scale is the mean magnitude.

    A block whose sum is not finite stays as it was, with scale 0 and bits 0.  True when every block was finite.  Memory:
    one pass (2 reads, 1 write) and a bit an element; the second loop finds its block in the cache.
    """
    finite = True
    lanes = np.zeros(LANES, np.float64)
    for b in range(starts.size):
        r = residual[starts[b] : stops[b]]
        g = gradient[starts[b] : stops[b]]
        q = codes[places[b] : places[b] + (r.size + 7) // 8]
        good, scale = _mean(r, g, lanes)
        if not good:
            scales[b] = np.float32(0.0)
            q[:] = 0
            finite = False
            continue
        scales[b] = scale
        whole = r.size - r.size % LANES
        for row in range(0, whole, LANES):
            take_signed(r, g, q, row, scale)
        q[whole // 8 :] = 0
        for i in range(whole, r.size):
            x = r[i] + g[i]
            negative = np.float32(x).view(np.int32) < 0
            q[i // 8] |= np.uint8(negative) << (i % 8)
            r[i] = x + scale if negative else x - scale
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
    """`out += sign * (scale * factor)` in float32, for blocks [first, last).

    Memory: one pass over out (1 read, 1 write) and a bit an element.
    """
    for b in range(first, last):
        x = out[starts[b] : stops[b]]
        q = codes[places[b] : places[b] + (x.size + 7) // 8]
        value = scales[b] * np.float32(factor)
        whole = x.size - x.size % LANES
        for row in range(0, whole, LANES):
            add_signed(x, q, row, value)
        for i in range(whole, x.size):
            x[i] += -value if q[i // 8] >> (i % 8) & 1 else value
