"""Sparse messages: entries (index, value) of a flat vector, packed into a buffer of fixed capacity and read back.

Payload: the values first, so that they are aligned as the buffer is, then the indices in their smallest coding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire import kernels
from thinwire.errors import MessageCoding, MessageCount, MessageIndex, MessageLength
from thinwire.messages.header import (
    HEADER_BYTES,
    Bytes,
    Flag,
    Header,
    IndexCoding,
    ValueCoding,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from thinwire.kernels.cpu.coding import Kept, Outcome

Floats: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int32]

LARGEST_ELEMENTS = 2**31 - 1
RICE_LARGEST_PARAMETER = 31

# Weyl sequence (64-bit golden ratio): the starts of any number of rotations are evenly spread
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Packed:
    """What `pack` did.  Entries at positions [cut_start, cut_stop) of the list, cyclic, are not in the message.

    `cut_start < cut_stop`: those between; `cut_start > cut_stop`: from `cut_start` to the end and from 0 to
    `cut_stop`; equal: none.
    """

    size: int  # bytes written, header included
    wanted: int  # bytes of the uncut message, header included
    entries: int
    cut_start: int
    cut_stop: int


# --- sizes -----------------------------------------------------------------------------------------------------------


def bound(elements: int, entries: int, values: ValueCoding) -> int:
    """Bytes, header included, that suffice for every message of at most `entries` entries.

    Integers only: equal on all machines.  For Rice coding: let x be the mean gap, and the parameter p = floor(log2 x).
    A code has 1 + p + quotient bits, the quotients add up to less than x / 2**p an entry, and one quotient in 16 can
    cost `width - 1 - p` more.  Together at most 2 + log2 x + (width - log2 x) / 8 bits per entry, which grows with x,
    and times the entries with their number.
    """
    entries = min(entries, elements)
    if entries <= 0:
        return HEADER_BYTES
    log = (elements // entries).bit_length()
    rice = 1 + _ceil(entries * (16 + _width(elements) + 7 * log), 64)
    return HEADER_BYTES + entries * values.bytes + min(_ceil(elements, 8), 4 * entries, rice)


def expected(elements: int, entries: int, values: ValueCoding) -> int:
    """Estimated bytes, header included, of `entries` random indices: gaps are geometric."""
    entries = min(entries, elements)
    index = 0.0
    if 0 < entries < elements:
        # the mean of gap // m is q**m / (1 - q**m), with q = 1 - density and m = 2**p
        logs = [math.log1p(-entries / elements) * 2**p for p in range(RICE_LARGEST_PARAMETER + 1)]
        code = min([1 + p - math.exp(log) / math.expm1(log) for p, log in enumerate(logs)])
        index = min(_ceil(elements, 8), 4 * entries, 1 + math.ceil(entries * code / 8))
    return HEADER_BYTES + entries * values.bytes + int(index)


def _ceil(count: int, divisor: int) -> int:
    return -(-count // divisor)


def _width(elements: int) -> int:
    """Bits of the largest possible gap."""
    return max(elements - 1, 0).bit_length()


# --- write -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """The smallest index coding for some entries."""

    index: IndexCoding
    bytes: int
    parameter: int


def pack(
    indices: Indices,
    values: Floats | None,
    elements: int,
    buffer: Bytes,
    coding: ValueCoding,
    rotation: int = 0,
    finite: bool = True,
) -> Packed:
    """Write header and payload into `buffer`, uint8 (capacity,), with the smallest index coding.

    indices int32 (k,), strictly ascending within [0, elements); values float32 (k,), or None with `ValueCoding.NONE`.
    What does not fit is one cyclic range of entries, as short as the coding allows, whose start moves with `rotation`:
    when a share f of the entries fits, every position is sent at least once in any 3 / f successive rotations.  Not
    `finite`: only a header with the flag is written, and all entries count as cut.  Bytes of `buffer` after the
    message are left as they are.  Memory: five reads of the indices, one of the values, one write of the message.
    """
    _check_flat("buffer", buffer, np.uint8)
    _check_flat("indices", indices, np.int32)
    if (values is None) != (coding is ValueCoding.NONE):
        raise ValueError(f"values: {'missing' if values is None else 'given'}, with value coding {coding.name}")
    if values is not None:
        _check_flat("values", values, np.float32)
        if len(values) != len(indices):
            raise ValueError(f"values: {len(values)} for {len(indices)} indices")
    if not 0 <= elements <= LARGEST_ELEMENTS:
        raise ValueError(f"elements: {elements}, at most {LARGEST_ELEMENTS} can be indexed")
    if not kernels.coding.ascending(indices, elements):
        raise ValueError(f"indices: must ascend strictly within [0, {elements})")
    count, capacity = len(indices), len(buffer)
    if not finite:
        write_header(buffer, Header(IndexCoding.U32, coding, Flag.NONFINITE, 0, 0, 0))
        return Packed(HEADER_BYTES, 0, 0, 0, count)

    kept: Kept = ((0, count), (0, 0))
    entries, flags, cut_start, cut_stop = count, Flag(0), 0, 0
    choice = _choose(indices, kept, elements, _mean_parameter(indices))
    wanted = HEADER_BYTES + count * coding.bytes + choice.bytes
    if wanted > capacity:
        flags = Flag.CUT
        cut_start = ((int(rotation) * _GOLDEN) % 2**64 * count) >> 64
        entries = _room(indices, cut_start, elements, capacity - HEADER_BYTES, coding, choice.parameter)
        if entries == 0:
            cut_start, cut_stop = 0, count
            kept = ((0, 0), (0, 0))
        elif entries >= cut_start:
            cut_stop = cut_start + count - entries
            kept = ((0, cut_start), (cut_stop, count))
        else:
            cut_stop = cut_start - entries
            kept = ((cut_stop, cut_start), (0, 0))
        choice = _choose(indices, kept, elements, choice.parameter)
    payload = entries * coding.bytes + choice.bytes
    write_header(buffer, Header(choice.index, coding, flags, entries, wanted, payload))

    if values is not None:
        kernels.coding.write_values(values, kept, int(coding), buffer, HEADER_BYTES)
    start, stop = HEADER_BYTES + entries * coding.bytes, HEADER_BYTES + payload
    if choice.index is IndexCoding.RICE:
        buffer[start] = choice.parameter
        kernels.coding.write_rice(indices, kept, choice.parameter, _width(elements), buffer, start + 1, stop)
    elif choice.index is IndexCoding.U32:
        kernels.coding.write_u32(indices, kept, buffer, start)
    elif choice.index is IndexCoding.BITMAP:
        kernels.coding.write_bitmap(indices, kept, buffer, start, stop)
    return Packed(stop, wanted, entries, cut_start, cut_stop)


def _mean_parameter(indices: Indices) -> int:
    """floor(log2 of the mean gap): start of the search for the best parameter; `bound` relies on it."""
    count = len(indices)
    if count == 0:
        return 0
    mean = (int(indices[-1]) + 1 - count) // count
    return max(mean.bit_length() - 1, 0)


def _choose(indices: Indices, kept: Kept, elements: int, parameter: int) -> _Choice:
    """The smallest index coding of the kept entries; among equal ones the fastest to decode."""
    entries = sum([end - begin for begin, end in kept])
    if entries == elements:
        return _Choice(IndexCoding.ALL, 0, parameter)
    if entries == 0:
        return _Choice(IndexCoding.U32, 0, parameter)
    parameter, bits = kernels.coding.rice_parameter(indices, kept, parameter, _width(elements))
    choices = (
        _Choice(IndexCoding.BITMAP, _ceil(elements, 8), parameter),
        _Choice(IndexCoding.U32, 4 * entries, parameter),
        _Choice(IndexCoding.RICE, 1 + _ceil(bits, 8), parameter),
    )
    return min(choices, key=lambda choice: choice.bytes)


def _room(indices: Indices, start: int, elements: int, room: int, coding: ValueCoding, parameter: int) -> int:
    """How many entries before position `start`, cyclic, fit `room` bytes in the coding that takes the most of them."""
    if room < 0:
        return 0
    fits = room // (4 + coding.bytes)
    if coding.bytes and room >= _ceil(elements, 8):
        fits = max(fits, (room - _ceil(elements, 8)) // coding.bytes)
    bits = 8 * (room - 1)
    return max(fits, kernels.coding.rice_room(indices, start, bits, 8 * coding.bytes, parameter, _width(elements)))


def rounded(values: Floats, coding: ValueCoding, out: Floats) -> None:
    """`out` receives the values as decoded by the receiver, both float32 (k,); they may be the same array.

    fp16 and bf16 round to nearest, ties to even, and saturate at their largest finite value.
    """
    _check_flat("values", values, np.float32)
    _check_flat("out", out, np.float32)
    if len(out) != len(values):
        raise ValueError(f"out: {len(out)} places for {len(values)} values")
    if coding is ValueCoding.NONE:
        raise ValueError("coding: NONE sends no values")
    kernels.coding.rounded(values, int(coding), out)


# --- read ------------------------------------------------------------------------------------------------------------


def unpack(buffer: Bytes, elements: int, indices: Indices, values: Floats) -> Header:
    """Read the entries of the message in `buffer`, uint8, into the first places of `indices` and `values`.

    indices int32, values float32, both at least as long as the number of entries.  Raises a `MessageError` for a
    malformed message; the arrays may then be partly written, never beyond their ends.
    """
    _check_flat("values", values, np.float32)
    header = decode_indices(buffer, elements, indices, with_values=True)
    if header.entries > len(values):
        raise MessageCount(f"entries: found {header.entries}, there is room for {len(values)} values")
    kernels.coding.read_values(buffer, HEADER_BYTES, header.entries, int(header.values), values)
    return header


def decode_indices(buffer: Bytes, elements: int, indices: Indices, *, with_values: bool = False) -> Header:
    """Read the entries of a message without values into the first places of `indices`, int32.  Errors as `unpack`."""
    _check_flat("indices", indices, np.int32)
    header, start = _checked(buffer, elements, with_values)
    stop = HEADER_BYTES + header.payload
    entries = header.entries
    if entries > len(indices):
        raise MessageCount(f"entries: found {entries}, there is room for {len(indices)} indices")
    outcome: Outcome = (kernels.coding.GOOD, 0, 0)
    if header.index is IndexCoding.RICE:
        parameter, width = _parameter(buffer, start), _width(elements)
        outcome = kernels.coding.read_rice(buffer, start + 1, stop, parameter, width, elements, entries, indices)
    elif header.index is IndexCoding.U32:
        outcome = kernels.coding.read_u32(buffer, start, elements, entries, indices)
    elif header.index is IndexCoding.BITMAP:
        outcome = kernels.coding.read_bitmap(buffer, start, stop, elements, entries, indices)
    else:
        indices[:entries] = np.arange(entries, dtype=np.int32)
    if outcome[0] != kernels.coding.GOOD:
        _refuse(outcome, header, elements)
    return header


def add_into(buffer: Bytes, out: Floats, scale: float) -> Header:
    """`out[index] += value * scale` for every entry; out float32 (elements,).

    The product is rounded to float32 before it is added.  Raises as `unpack`; `out` may then be partly changed.
    """
    _check_flat("out", out, np.float32)
    header, start = _checked(buffer, len(out), with_values=True)
    stop = HEADER_BYTES + header.payload
    entries, coding, factor = header.entries, int(header.values), np.float32(scale)
    outcome: Outcome = (kernels.coding.GOOD, 0, 0)
    if header.index is IndexCoding.RICE:
        parameter, width = _parameter(buffer, start), _width(len(out))
        outcome = kernels.coding.add_rice(
            buffer, start + 1, stop, parameter, width, entries, HEADER_BYTES, coding, factor, out
        )
    elif header.index is IndexCoding.U32:
        outcome = kernels.coding.add_u32(buffer, start, entries, HEADER_BYTES, coding, factor, out)
    elif header.index is IndexCoding.BITMAP:
        outcome = kernels.coding.add_bitmap(buffer, start, stop, entries, HEADER_BYTES, coding, factor, out)
    else:
        kernels.coding.add_all(buffer, HEADER_BYTES, coding, factor, out)
    if outcome[0] != kernels.coding.GOOD:
        _refuse(outcome, header, len(out))
    return header


def _checked(buffer: Bytes, elements: int, with_values: bool) -> tuple[Header, int]:
    """The header, with counts and lengths that agree with each other and with the buffer, and where indices begin."""
    _check_flat("buffer", buffer, np.uint8)
    if not 0 <= elements <= LARGEST_ELEMENTS:
        raise ValueError(f"elements: {elements}, at most {LARGEST_ELEMENTS} can be indexed")
    header = read_header(buffer)
    if header.index is IndexCoding.OPAQUE:
        raise MessageCoding("index coding: found 0 OPAQUE, which only its codec can read; sparse messages have 1 to 4")
    if (header.values is not ValueCoding.NONE) != with_values:
        right = "1 to 3" if with_values else "0 NONE"
        raise MessageCoding(f"value coding: found {header.values.value} {header.values.name}, here it must be {right}")
    if header.entries > elements:
        raise MessageCount(f"entries: found {header.entries}, the group has {elements} elements")
    if header.index is IndexCoding.ALL and header.entries != elements:
        raise MessageCount(f"entries: found {header.entries}, index coding ALL has {elements}, one for each element")
    value_bytes = header.entries * header.values.bytes
    if header.index is IndexCoding.RICE:
        if header.payload < value_bytes + 1:
            raise MessageLength(
                f"payload: found {header.payload} bytes, {header.entries} {header.values.name} values and a Rice "
                f"parameter take {value_bytes + 1}"
            )
    else:
        index_bytes = {
            IndexCoding.BITMAP: _ceil(elements, 8),
            IndexCoding.U32: 4 * header.entries,
            IndexCoding.ALL: 0,
        }[header.index]
        if header.payload != value_bytes + index_bytes:
            raise MessageLength(
                f"payload: found {header.payload} bytes, {header.entries} entries in {header.index.name} and "
                f"{header.values.name} take {value_bytes + index_bytes}"
            )
    return header, HEADER_BYTES + value_bytes


def _parameter(buffer: Bytes, at: int) -> int:
    parameter = int(buffer[at])
    if parameter > RICE_LARGEST_PARAMETER:
        raise MessageCoding(f"Rice parameter: found {parameter}, at most {RICE_LARGEST_PARAMETER} is possible")
    return parameter


def _refuse(outcome: Outcome, header: Header, elements: int) -> NoReturn:
    wrong, entry, found = outcome
    if wrong == kernels.coding.PAST_THE_END:
        raise MessageIndex(f"index of entry {entry}: found {found}, the group has {elements} elements")
    if wrong == kernels.coding.NOT_ASCENDING:
        raise MessageIndex(f"index of entry {entry}: found {found}, which is not greater than the one before it")
    if wrong == kernels.coding.TOO_MANY:
        raise MessageCount(f"entries: the header says {header.entries}, the bitmap has more, the next is {found}")
    if wrong == kernels.coding.TOO_FEW:
        raise MessageCount(f"entries: the header says {header.entries}, the bitmap has {entry}")
    if wrong == kernels.coding.ENDS_EARLY:
        raise MessageLength(f"payload: {header.payload} bytes end within entry {entry} of {header.entries}")
    raise MessageLength(
        f"payload: found {header.payload} bytes, but the codes of {header.entries} entries end before byte "
        f"{found - HEADER_BYTES} and zeros up to the next byte are all that may follow"
    )


def _check_flat(name: str, array: NDArray[np.generic], dtype: type[np.generic]) -> None:
    """Any other kind of array would recompile the kernels in the middle of a step."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: {array.dtype} of shape {array.shape}{'' if array.flags.c_contiguous else ', not contiguous'}; "
            f"must be one-dimensional, contiguous {np.dtype(dtype).name}"
        )
