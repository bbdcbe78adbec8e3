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

Momentum = Literal["none", "plain", "nesterov"]

WIDTH = 16
ALIGNMENT = 4 * WIDTH
_I32 = ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)
_EXPONENT = 0x7F800000  # all ones exactly for NaN and infinity


def _store_zeros(_context: Any, array: Any, _start: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), _FLOATS.as_pointer())
        store = builder.store(ir.Constant(_FLOATS, [0.0] * WIDTH), place, align=ALIGNMENT)
        store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _advance(kind: Momentum) -> Callable[..., int]:
    def typed(
        _context: Any, shared: Any, error: Any, momentum: Any, gradient: Any, point: Any, _start: Any,
        _lr: Any, _mu: Any, _scale: Any, _strength: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            start = arguments[5]

            def place(index: int) -> Any:
                data = context.make_array(signature.args[index])(context, builder, arguments[index]).data
                return builder.bitcast(builder.gep(data, [start]), _FLOATS.as_pointer())

            def everywhere(number: Any) -> Any:
                undefined = ir.Constant(_FLOATS, ir.Undefined)
                single = builder.insert_element(undefined, number, _I32(0))
                return builder.shuffle_vector(single, undefined, ir.Constant(_INTEGERS, [0] * WIDTH))

            def load(index: int) -> Any:
                return builder.load(place(index), align=4)

            lr, mu, scale, strength = (everywhere(number) for number in arguments[6:])
            step = builder.fmul(load(3), scale)
            if kind != "none":
                moved = builder.fadd(builder.fmul(mu, load(2)), step)
                builder.store(moved, place(2), align=4)
                step = builder.fadd(step, builder.fmul(mu, moved)) if kind == "nesterov" else moved
            total = builder.fadd(load(1), builder.fmul(lr, step))
            builder.store(total, place(1), align=4)
            away = builder.fsub(load(0), builder.fmul(strength, total))
            store = builder.store(away, place(4), align=ALIGNMENT)
            store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
            exponents = ir.Constant(_INTEGERS, [_EXPONENT] * WIDTH)
            bits = builder.and_(builder.bitcast(total, _INTEGERS), exponents)
            bad = builder.bitcast(builder.icmp_signed("==", bits, exponents), ir.IntType(WIDTH))
            return builder.zext(bad, ir.IntType(64))

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
