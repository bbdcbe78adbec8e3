"""Conversion of float32 to fp16 and bf16 bits and back.  Shared by kernels of several files, see `_jit`."""

import numpy as np

from thinwire.kernels.cpu._bytes import load2, load4
from thinwire.kernels.cpu._jit import Bytes, kernel

FP32, FP16, BF16 = 1, 2, 3  # as in the header of a message


@kernel
def narrow(value: np.float32, coding: int) -> np.uint64:
    """The bits of one value as written: nearest, ties to even, and never an infinity out of a finite value."""
    bits = int(np.int64(np.float32(value).view(np.uint32)))
    if coding == FP32:
        return np.uint64(bits)
    sign = (bits >> 16) & 0x8000
    size = bits & 0x7FFFFFFF
    if coding == BF16:
        if size > 0x7F800000:
            return np.uint64(sign | 0x7FC0)
        return np.uint64(sign | min((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F))
    if size > 0x7F800000:
        return np.uint64(sign | 0x7E00)
    if size < 0x38800000:  # below 2**-14 fp16 is a multiple of 2**-24, which is the last place of 0.5
        lifted = np.uint32(size).view(np.float32) + np.float32(0.5)
        return np.uint64(sign | (np.int64(np.float32(lifted).view(np.uint32)) - 0x3F000000))
    return np.uint64(sign | min((size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13, 0x7BFF))


@kernel
def widen(bits: np.uint64, coding: int) -> np.float32:
    """The value that the bits stand for; exact."""
    if coding == FP32:
        return np.uint32(bits).view(np.float32)
    if coding == BF16:
        return np.uint32(bits << np.uint64(16)).view(np.float32)
    half = int(np.int64(bits))
    sign = (half & 0x8000) << 16
    exponent = half & 0x7C00
    size = (half & 0x7FFF) << 13
    if exponent == 0x7C00:
        return np.uint32(sign | (size + 0x70000000)).view(np.float32)
    if exponent == 0:  # a difference of two normal numbers, so that flushing of denormals does not matter
        small = np.uint32(size + 0x38800000).view(np.float32) - np.uint32(0x38800000).view(np.float32)
        return np.uint32(sign | np.int64(np.float32(small).view(np.uint32))).view(np.float32)
    return np.uint32(sign | (size + 0x38000000)).view(np.float32)


@kernel
def read_value(data: Bytes, at: np.uint64, coding: int) -> np.float32:
    """The value whose bytes begin at `at`."""
    return widen(load4(data, at) if coding == FP32 else load2(data, at), coding)
