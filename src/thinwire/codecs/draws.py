"""Shared randomness: numbers derived from a key (seed, step, name), equal on all ranks.

The key is hashed with BLAKE2 (Python's `hash` of a string differs between processes) and the digest seeds a bit generator,
whose raw output NumPy keeps stable between versions, unlike its distributions.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Key = str | int


def generator(*key: Key) -> np.random.PCG64:
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.PCG64(int.from_bytes(digest, "little"))


def uniform(bits: np.random.PCG64, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1), 53 bits each."""
    raw: NDArray[np.uint64] = bits.random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def subset(bits: np.random.PCG64, elements: int, count: int) -> NDArray[np.int32]:
    """`count` distinct numbers below `elements`, ascending; every such set is equally likely.

    Draws as many numbers as are missing until enough are distinct. Time: a few sorts of the set; above half of the elements
    the complement is drawn instead.
    """
    if 2 * count > elements:
        kept = np.ones(elements, np.bool_)
        kept[subset(bits, elements, elements - count)] = False
        return np.flatnonzero(kept).astype(np.int32)
    chosen = np.empty(0, np.int32)
    while chosen.size < count:
        more = (uniform(bits, count - chosen.size) * elements).astype(np.int32)
        chosen = np.sort(np.concatenate([chosen, more]))
        first = np.ones(chosen.size, np.bool_)
        np.not_equal(chosen[1:], chosen[:-1], out=first[1:])
        chosen = chosen[first]
    return chosen
