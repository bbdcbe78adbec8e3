"""Tile-wise accumulation with a finite test, and prefetching.

Shared by kernels of several files, see `_jit`.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from thinwire.kernels.cpu._jit import Floats, kernel
from thinwire.kernels.cpu._llvm import I32, I64, floats, not_finite, pointer, prefetch_line, splat

TILE = 4096
AHEAD = 24  # prefetch distance in list entries: a cache line takes about as long as ten of them
_BLOCK = 64
LANES = 8
_LARGEST = np.float32(np.finfo(np.float32).max)


def _add_and_keep(_context: Any, residual: Any, gradient: Any, before: Any, _start: Any, _at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, at = arguments[3:]
        there, fresh, kept = (
            pointer(context, builder, kind, array, place, floats(_BLOCK))
            for kind, array, place in zip(signature.args[:3], arguments[:3], (start, start, at), strict=True)
        )
        old = builder.load(there, align=4)
        total = builder.fadd(old, builder.load(fresh, align=4))
        builder.store(old, kept, align=4)
        builder.store(total, there, align=4)
        return not_finite(builder, total, _BLOCK)

    return types.uint64(residual, gradient, before, types.intp, types.intp), generate


def _prefetch(_context: Any, array: Any, _place: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        prefetch_line(builder, builder.gep(data, [arguments[1]]), write=True)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _add_and_test(_: Any, residual: Any, gradient: Any, start: Any, extra: Any, top: Any, ahead: Any) -> Any:
    """Vectors by hand, because LLVM does not find the move-mask of a comparison in a scalar loop."""
    signature = types.uint64(residual, gradient, types.intp, types.float32, types.float32, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = [context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 1)]
        start, extra, top, ahead = arguments[2:]
        vector, integers = floats(LANES), ir.VectorType(I32, LANES)
        there, fresh = (builder.bitcast(builder.gep(base, [start]), vector.as_pointer()) for base in data)
        step = builder.load(fresh, align=4)
        total = builder.fadd(builder.load(there, align=4), step)
        builder.store(total, there, align=4)
        tested = builder.fadd(total, builder.fmul(step, splat(builder, extra, vector)))
        magnitude = builder.and_(builder.bitcast(tested, integers), ir.Constant(integers, [0x7FFFFFFF] * LANES))
        large = builder.fcmp_ordered(">=", builder.bitcast(magnitude, vector), splat(builder, top, vector))
        signed = builder.fcmp_unordered("!=", total, ir.Constant(vector, [0.0] * LANES))
        for base in data:
            prefetch_line(builder, builder.gep(base, [builder.add(start, ahead)]), write=False)
        return builder.zext(builder.bitcast(builder.and_(large, signed), ir.IntType(LANES)), I64)

    return signature, generate


_add_block: Callable[[Floats, Floats, Floats, int, int], np.uint64] = cast(Any, intrinsic(_add_and_keep))
"""`_add_block(residual, gradient, before, start, at)` adds 64 elements from `start` on and saves their old values in
`before` from `at` on; bit i of the result is set if sum i is not finite."""

prefetch: Callable[[Floats, int], None] = cast(Any, intrinsic(_prefetch))
"""`prefetch(x, place)`: load the cache line of x[place] for reading and writing. Any place is allowed."""


add_and_test: Callable[..., np.uint64] = cast(Any, intrinsic(_add_and_test))
"""`add_and_test(residual, gradient, start, extra, top, ahead)`, for 8 elements from `start` on: `residual += gradient`; bit i
of the result is set if |residual + extra * gradient| of element i is at least `top`, and its residual is not zero.

It prefetches what lies `ahead` elements on, which keeps the memory busy while this block is worked on.
"""


@kernel
def add_tile(residual: Floats, gradient: Floats, tile: int, before: Floats) -> bool:
    """`residual += gradient` on the tile of 4096 elements from `tile` on, unless a sum of it is not finite.

    before float32 (4096,) holds the old values until all sums are known to be finite: it stays in the first-level cache,
    which took a fifth less time than testing the sums before adding.
    """
    end = min(tile + TILE, residual.size)
    whole = end - (end - tile) % _BLOCK
    bad = np.uint64(0)
    for place in range(tile, whole, _BLOCK):
        bad |= _add_block(residual, gradient, before, place, place - tile)
    for i in range(whole, end):
        total = residual[i] + gradient[i]
        before[i - tile] = residual[i]
        residual[i] = total
        bad |= np.uint64(not (abs(total) <= _LARGEST))
    if bad != 0:
        for i in range(tile, end):
            residual[i] = before[i - tile]
    return bool(bad == 0)
