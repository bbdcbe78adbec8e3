"""MiCRO's messages: the largest of the selected elements that fit, and how many were selected.

A header has the number of entries and the bytes of the uncut message. Where a message is cut, those bytes are its own and, for
each element that is missing, the bytes that an entry takes, rounded up: so they tell how many are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..messages import HEADER_BYTES, Flag, ValueCoding

Indices: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]
_LARGEST = 2**32 - 1


def largest(indices: Indices, scores: Floats, count: int) -> Indices:
    """The `count` indices with the largest scores, in their order; of equal scores the first."""
    if count >= indices.size:
        return indices
    if count <= 0:
        return indices[:0]
    least = np.partition(scores, scores.size - count)[scores.size - count]
    kept = scores > least
    ties = np.flatnonzero(scores == least)
    kept[ties[: count - np.count_nonzero(kept)]] = True
    found: Indices = indices[kept]
    return found


def pack(
    indices: Indices,
    scores: Callable[[Indices], Floats],
    selected: int,
    elements: int,
    buffer: NDArray[np.uint8],
    *,
    finite: bool,
) -> int:
    """Write a message of as many of the largest entries as fit the buffer; returns its size in bytes.

    indices int32 (k,), ascending within [0, elements), are the largest of `selected` ones. Scores are only asked for where
    something does not fit.
    """
    packed = messages.pack(indices, None, elements, buffer, ValueCoding.NONE, finite=finite)
    while finite and packed.entries < indices.size:
        # Entries farther apart take longer codes, so fewer of them may fit than `pack` found in a row.
        indices = largest(indices, scores(indices), packed.entries)
        packed = messages.pack(indices, None, elements, buffer, ValueCoding.NONE)
    if finite and packed.entries < selected:
        missing = selected - packed.entries
        wanted = packed.size + missing * _bytes_each(packed.entries, packed.size - HEADER_BYTES)
        buffer[:HEADER_BYTES].view("<u2")[1] |= Flag.CUT
        buffer[:HEADER_BYTES].view("<u4")[2] = min(wanted, _LARGEST)
    return packed.size


def _bytes_each(entries: int, payload: int) -> int:
    return max(1, -(-payload // max(1, entries)))


def selected(entries: int, wanted: int, payload: int) -> int:
    """How many elements the sender had selected, from the fields of its header."""
    beyond = max(0, wanted - HEADER_BYTES - payload)
    return entries + beyond // _bytes_each(entries, payload)


def request(headers: NDArray[np.uint32], most: int | None) -> int:
    """Bytes for messages of as many elements as were selected, but of no more than `most`; headers: words [ranks, 4]."""
    longest = HEADER_BYTES
    for _, entries, wanted, payload in headers.tolist():
        count = selected(entries, wanted, payload)
        if most is not None:
            count = min(count, most)
        longest = max(longest, HEADER_BYTES + -(-payload * count // max(1, entries)))
    return longest
