"""Pieces of LLVM code that the intrinsics of several files share: vectors in memory, constants, prefetching, finite tests."""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

I32, I64 = ir.IntType(32), ir.IntType(64)
EXPONENT = 0x7F800000  # all ones exactly for NaN and infinity


def floats(lanes: int) -> Any:
    """The type of a vector of float32."""
    return ir.VectorType(ir.FloatType(), lanes)


def pointer(context: Any, builder: Any, kind: Any, array: Any, start: Any, vector: Any) -> Any:
    """Where a vector begins at element `start` of a NumPy array."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def splat(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector of equal elements."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, I32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count))


def not_finite(builder: Any, values: Any, lanes: int) -> Any:
    """An integer of `lanes` bits: bit i is set if float i is infinite or NaN."""
    exponents = ir.Constant(ir.VectorType(I32, lanes), [EXPONENT] * lanes)
    bits = builder.and_(builder.bitcast(values, exponents.type), exponents)
    return builder.bitcast(builder.icmp_signed("==", bits, exponents), ir.IntType(lanes))


def prefetch_line(builder: Any, place: Any, write: bool) -> None:
    """Load the cache line of a place, to be kept."""
    name, byte_pointer = "llvm.prefetch.p0", ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte_pointer, I32, I32, I32])
    call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(call, [builder.bitcast(place, byte_pointer), *(I32(flag) for flag in (int(write), 3, 1))])


def store_past_cache(builder: Any, values: Any, place: Any, align: int) -> None:
    """A store that does not read its cache line first."""
    store = builder.store(values, place, align=align)
    store.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
