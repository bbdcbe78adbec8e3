"""Non-temporal stores of 16 elements as LLVM intrinsics: zeros, and the point of a step in update space.

An ordinary store first reads its cache line, a sixth of the memory traffic of such a step. Other threads see what was stored
once the caller has re-acquired the interpreter lock, which acts as a fence.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.kernels.cpu._llvm import I64, floats, not_finite, pointer, splat, store_past_cache

Momentum = Literal["none", "plain", "nesterov"]

WIDTH = 16
ALIGNMENT = 4 * WIDTH
_FLOATS = floats(WIDTH)


def _store_zeros(_context: Any, array: Any, _start: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = pointer(context, builder, signature.args[0], arguments[0], arguments[1], _FLOATS)
        store_past_cache(builder, ir.Constant(_FLOATS, [0.0] * WIDTH), place, ALIGNMENT)
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _advance(kind: Momentum) -> Callable[..., int]:
    def typed(
        _context: Any, shared: Any, error: Any, momentum: Any, gradient: Any, point: Any, _start: Any,
        _lr: Any, _mu: Any, _scale: Any, _strength: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            places = [
                pointer(context, builder, signature.args[i], arguments[i], arguments[5], _FLOATS) for i in range(5)
            ]
            lr, mu, scale, strength = (splat(builder, number, _FLOATS) for number in arguments[6:])
            step = builder.fmul(builder.load(places[3], align=4), scale)
            if kind != "none":
                moved = builder.fadd(builder.fmul(mu, builder.load(places[2], align=4)), step)
                builder.store(moved, places[2], align=4)
                step = builder.fadd(step, builder.fmul(mu, moved)) if kind == "nesterov" else moved
            total = builder.fadd(builder.load(places[1], align=4), builder.fmul(lr, step))
            builder.store(total, places[1], align=4)
            away = builder.fsub(builder.load(places[0], align=4), builder.fmul(strength, total))
            store_past_cache(builder, away, places[4], ALIGNMENT)
            return builder.zext(not_finite(builder, total, WIDTH), I64)

        number = types.float32
        arrays = (shared, error, momentum, gradient, point)
        return types.int64(*arrays, types.intp, number, number, number, number), generate

    return cast(Callable[..., int], intrinsic(typed))


stream_zeros: Callable[[NDArray[np.float32], int], None] = cast(Any, intrinsic(_store_zeros))
"""`stream_zeros(x, start)`: zero x[start : start + 16] without reading its cache line first.

The caller ensures that x[start] is aligned to ALIGNMENT bytes, and start + 16 <= x.size.
"""

advance_without, advance_with, advance_nesterov = (_advance(kind) for kind in ("none", "plain", "nesterov"))
"""`advance_with(shared, error, momentum, gradient, point, start, lr, mu, scale, strength)`: elements [start, start + 16) of the
step in `updates.advance` without decay; the result is non-zero if an error is not finite.

The caller ensures that point[start] is aligned to ALIGNMENT bytes, and start + 16 <= point.size.
"""
