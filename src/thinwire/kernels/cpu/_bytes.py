"""Little-endian words in byte arrays.  Shared by kernels of several files, see `_jit`.

Offsets into bytes are uint64: LLVM then joins the byte accesses into one access of 8 bytes, on any alignment, while a
signed offset would first be tested for a negative value.  A uint64 and a plain integer would make a float64, hence
the typed constants.
"""

import numpy as np

from thinwire.kernels.cpu._jit import Bytes, kernel

U0, U1, U2, U3, U4, U5, U6, U7, U8 = (np.uint64(i) for i in range(9))
U16, _24, U32, _40, _48, _56 = (np.uint64(i) for i in (16, 24, 32, 40, 48, 56))


@kernel
def load2(data: Bytes, at: np.uint64) -> np.uint64:
    return np.uint64(np.uint64(data[at]) | (np.uint64(data[at + U1]) << U8))


@kernel
def load4(data: Bytes, at: np.uint64) -> np.uint64:
    return np.uint64(load2(data, at) | (np.uint64(data[at + U2]) << U16) | (np.uint64(data[at + U3]) << _24))


@kernel
def load8(data: Bytes, at: np.uint64, stop: np.uint64) -> np.uint64:
    """Eight bytes from `at` on; zeros stand for those from `stop` on."""
    if at + U8 <= stop:
        return np.uint64(load4(data, at) | (load4(data, at + U4) << U32))
    word, shift = U0, U0
    while at < stop:
        word |= np.uint64(data[at]) << shift
        at += U1
        shift += U8
    return word


@kernel
def store2(data: Bytes, at: np.uint64, word: np.uint64) -> None:
    data[at] = np.uint8(word)
    data[at + U1] = np.uint8(word >> U8)


@kernel
def store4(data: Bytes, at: np.uint64, word: np.uint64) -> None:
    store2(data, at, word)
    data[at + U2] = np.uint8(word >> U16)
    data[at + U3] = np.uint8(word >> _24)


@kernel
def store8(data: Bytes, at: np.uint64, word: np.uint64) -> None:
    store4(data, at, word)
    data[at + U4] = np.uint8(word >> U32)
    data[at + U5] = np.uint8(word >> _40)
    data[at + U6] = np.uint8(word >> _48)
    data[at + U7] = np.uint8(word >> _56)
