"""LLVM intrinsics: compare 64 floats to a bit mask, find and count set bits, dereference an address.

LLVM compiles the wide comparison to the vector instructions of the machine.  A loop over the bits of the mask
then touches selected elements only, which at a density of 1 % took half the time of a branch-free compaction.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from thinwire.kernels.cpu._llvm import I32, I64, pointer, splat

BLOCK = 64
_VECTOR = ir.VectorType(I32, BLOCK)


def _magnitudes_from(_context: Any, bits: Any, _start: Any, _threshold: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block = builder.load(pointer(context, builder, signature.args[0], arguments[0], arguments[1], _VECTOR))
        block.align = 4  # float32 is all that is known; LLVM would otherwise assume that of the whole vector
        block = builder.and_(block, ir.Constant(_VECTOR, [0x7FFFFFFF] * BLOCK))
        threshold = splat(builder, arguments[2], _VECTOR)
        return builder.bitcast(builder.icmp_signed(">=", block, threshold), I64)

    return types.uint64(bits, types.intp, types.int32), generate


def _count_trailing_zeros(_context: Any, _word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I64, [I64, ir.IntType(1)])
        return builder.call(
            builder.module.declare_intrinsic("llvm.cttz", [I64], kind), [arguments[0], ir.IntType(1)(0)]
        )

    return types.int64(types.uint64), generate


def _count_ones(_context: Any, _word: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.ctpop", [I64]), [arguments[0]])

    return types.int64(types.uint64), generate


def _pointer(_context: Any, _address: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate  # type: ignore[no-untyped-call]


block_mask: Callable[[NDArray[np.int32], int, np.int32], np.uint64] = cast(Any, intrinsic(_magnitudes_from))
"""`block_mask(bits, start, threshold)`: bit i of the uint64 is set if |x[start + i]| >= threshold.

bits is the int32 view of float32 x, threshold the bits of a positive float32: magnitudes order like their bits, NaN
above all.  The caller ensures start + 64 <= x.size.
"""

lowest_bit: Callable[[np.uint64], int] = cast(Any, intrinsic(_count_trailing_zeros))
"""`lowest_bit(mask)`: the position of the lowest set bit of a uint64, 64 for none."""

count_bits: Callable[[np.uint64], int] = cast(Any, intrinsic(_count_ones))
"""`count_bits(mask)`: how many bits of a uint64 are set."""

pointer_to: Callable[[int], Any] = cast(Any, intrinsic(_pointer))
"""`pointer_to(address)`: a pointer to float32 values in memory, for `numba.carray`. The caller keeps them alive."""

ONE = np.uint64(1)
