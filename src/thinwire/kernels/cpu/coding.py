"""Index and value codings of messages, compiled.  `docs/message-format.md` is the specification.

`data` is a whole message, uint8; `at` and `stop` are byte offsets into it.  Entries to write are the positions in two
ranges of the entry list, `kept`, since a message that was cut leaves out one range.  Kernels that write trust their
arguments; kernels that read trust `elements`, `entries`, the offsets and the sizes of the arrays, which the caller has
checked against each other, but none of the bytes between `at` and `stop`.  Equal to `reference.coding` bit for bit.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._bytes import U0, U1, U2, U3, U4, U7, U8, U16, load4, load8, store2, store4, store8
from thinwire.kernels.cpu._halves import FP32, narrow, read_value, widen
from thinwire.kernels.cpu._jit import Bytes, Floats, Indices, kernel
from thinwire.kernels.cpu._masks import lowest_bit
from thinwire.kernels.cpu._tiles import AHEAD, prefetch

Kept: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
Outcome: TypeAlias = tuple[int, int, int]  # what is wrong, at which entry, the index or offset found there

LIMIT = 16  # a quotient of this size or more is not written in unary; the longest code then has 47 bits
LARGEST_PARAMETER = 31
BLOCK = 1024  # entries that are decoded before they are added

GOOD, ENDS_EARLY, PAST_THE_END, NOT_ASCENDING, TOO_MANY, TOO_FEW, LEFT_OVER = range(7)

_ESCAPE = np.uint64((1 << LIMIT) - 1)


# --- values ----------------------------------------------------------------------------------------------------------


@kernel
def write_values(values: Floats, kept: Kept, coding: int, data: Bytes, at: int) -> None:
    """Write the kept values from `at` on.  Memory: one read, one write of half or all of it."""
    place = np.uint64(at)
    for begin, end in kept:
        for i in range(begin, end):
            bits = narrow(values[i], coding)
            if coding == FP32:
                store4(data, place, bits)
                place += U4
            else:
                store2(data, place, bits)
                place += U2


@kernel
def read_values(data: Bytes, at: int, entries: int, coding: int, values: Floats) -> None:
    """`values[i]` is the value of entry i, for all entries.  Memory: one read, one write."""
    place, step = np.uint64(at), U4 if coding == FP32 else U2
    for i in range(entries):
        values[i] = read_value(data, place, coding)
        place += step


@kernel
def rounded(values: Floats, coding: int, out: Floats) -> None:
    """`out[i]` is `values[i]` as decoded by the receiver.  Memory: one read, one write."""
    for i in range(values.size):
        out[i] = widen(narrow(values[i], coding), coding)


@kernel
def take_rounded(
    residual: Floats, indices: Indices, coding: int, limit: float, words: NDArray[np.uint16], values: Floats
) -> None:
    """Take `residual[indices[i]]` rounded to 16 bits, and leave the rounding error there.

    `words[i]` is the element, clipped to +-limit and rounded; `values[i]` is the same as float32.
    residual float32 (n,), indices int32 (k,), distinct, words uint16 (k,), values float32 (k,).
    Memory: k cache lines read and written.
    """
    most, last = np.float32(limit), indices.size - 1
    for i in range(indices.size):
        prefetch(residual, indices[min(i + AHEAD, last)])
        j = indices[i]
        bits = narrow(min(max(residual[j], -most), most), coding)
        sent = widen(bits, coding)
        words[i] = np.uint16(bits)
        values[i] = sent
        residual[j] -= sent


# --- indices: write --------------------------------------------------------------------------------------------------


@kernel
def ascending(indices: Indices, elements: int) -> bool:
    """True when the indices ascend strictly within [0, elements).  Memory: one read of the entries."""
    good = True
    for i in range(1, indices.size):
        good &= indices[i] > indices[i - 1]
    return good and (indices.size == 0 or (indices[0] >= 0 and indices[-1] < elements))


@kernel
def _code_bits(gap: int, parameter: int, width: int) -> int:
    quotient = gap >> parameter
    return quotient + 1 + parameter if quotient < LIMIT else LIMIT + width


@kernel
def _rice_bits_of_three(indices: Indices, kept: Kept, parameter: int, width: int) -> tuple[int, int, int]:
    """Bits of the kept entries with one parameter less, with this one, and with one more, where there are.

    `width` is the number of bits of the largest possible gap.  Memory: one read of the entries.
    """
    below, above = max(parameter - 1, 0), min(parameter + 1, LARGEST_PARAMETER)
    fewer, same, more = 0, 0, 0
    previous = -1
    for begin, end in kept:
        if begin == end:
            continue
        gap = int(indices[begin]) - previous - 1
        fewer += _code_bits(gap, below, width)
        same += _code_bits(gap, parameter, width)
        more += _code_bits(gap, above, width)
        for i in range(begin + 1, end):  # gaps are independent of each other, so that several are in flight
            gap = int(indices[i]) - int(indices[i - 1]) - 1
            fewer += _code_bits(gap, below, width)
            same += _code_bits(gap, parameter, width)
            more += _code_bits(gap, above, width)
        previous = int(indices[end - 1])
    return fewer, same, more


@kernel
def rice_parameter(indices: Indices, kept: Kept, parameter: int, width: int) -> tuple[int, int]:
    """The best parameter downhill from `parameter`, and its bits.  Memory: one read of the entries, seldom more."""
    fewer, same, more = _rice_bits_of_three(indices, kept, parameter, width)
    while more < same:
        parameter += 1
        fewer, same, more = _rice_bits_of_three(indices, kept, parameter, width)
    while fewer < same:
        parameter -= 1
        fewer, same, more = _rice_bits_of_three(indices, kept, parameter, width)
    return parameter, same


@kernel
def rice_room(indices: Indices, start: int, room: int, value_bits: int, parameter: int, width: int) -> int:
    """How many of the entries that end, cyclically, before position `start` fit `room` bits.  Memory: one read."""
    count = indices.size
    border = int(indices[start - 1]) if start > 0 else -1
    fits = 0
    bits = 0  # of the kept entries without the first of those that were added last: its gap depends on what follows
    for kept in range(1, count):
        position = start - kept if kept <= start else count + start - kept
        index = int(indices[position])
        before = -1 if position < start else border
        if bits + _code_bits(index - before - 1, parameter, width) + kept * value_bits <= room:
            fits = kept
        before = int(indices[position - 1]) if position > 0 else -1
        bits += _code_bits(index - before - 1, parameter, width)
    return fits


@kernel
def write_rice(indices: Indices, kept: Kept, parameter: int, width: int, data: Bytes, at: int, stop: int) -> None:
    """Write the codes of the kept entries into [at, stop), exactly the bytes they take.  One read, one write."""
    place, last = np.uint64(at), np.uint64(stop)
    pending, count = U0, U0  # fewer than 8 bits between two entries
    previous = -1
    shift = np.uint64(parameter)
    mask = (U1 << shift) - U1
    for begin, end in kept:
        for i in range(begin, end):
            index = int(indices[i])
            gap = np.uint64(index - previous - 1)
            previous = index
            quotient = gap >> shift
            if quotient < U16:
                pending |= (((gap & mask) << U1) | U1) << (quotient + count)
                count += quotient + U1 + shift
            else:
                pending |= gap << (U16 + count)
                count += U16 + np.uint64(width)
            if place + U8 <= last:  # bytes past `count` are overwritten by the entries that follow
                store8(data, place, pending)
                place += count >> U3
                pending >>= count & ~U7
                count &= U7
            else:
                while count >= U8:
                    data[place] = np.uint8(pending)
                    place += U1
                    pending >>= U8
                    count -= U8
    if count > U0:
        data[place] = np.uint8(pending)


@kernel
def write_u32(indices: Indices, kept: Kept, data: Bytes, at: int) -> None:
    """Write the kept indices from `at` on, 4 bytes each.  One read, one write."""
    place = np.uint64(at)
    for begin, end in kept:
        for i in range(begin, end):
            store4(data, place, np.uint64(indices[i]))
            place += U4


@kernel
def write_bitmap(indices: Indices, kept: Kept, data: Bytes, at: int, stop: int) -> None:
    """Write [at, stop), one bit an element.  One read of the entries, two writes of the bitmap."""
    data[at:stop] = 0
    for begin, end in kept:
        for i in range(begin, end):
            index = int(indices[i])
            data[at + (index >> 3)] |= np.uint8(1 << (index & 7))


# --- indices: read ---------------------------------------------------------------------------------------------------


@kernel
def _next_gap(
    data: Bytes, bit: np.uint64, stop: np.uint64, shift: np.uint64, width: np.uint64
) -> tuple[np.uint64, np.uint64]:
    """The gap whose code begins at `bit`, and the bit after it.  A window has 57 good bits, a code at most 47."""
    window = load8(data, bit >> U3, stop) >> (bit & U7)
    if window & _ESCAPE == U0:
        return (window >> U16) & ((U1 << width) - U1), bit + U16 + width
    quotient = np.uint64(lowest_bit(window))
    rest = (window >> (quotient + U1)) & ((U1 << shift) - U1)
    return (quotient << shift) | rest, bit + quotient + U1 + shift


@kernel
def _rice_end(data: Bytes, bit: np.uint64, stop: np.uint64, entries: int) -> Outcome:
    """Nothing but zeros up to the next byte may follow the last code."""
    if (bit + U7) >> U3 != stop:
        return LEFT_OVER, entries, int(np.int64((bit + U7) >> U3))
    if bit & U7 != U0 and data[bit >> U3] >> (bit & U7) != 0:
        return LEFT_OVER, entries, int(np.int64(bit >> U3))
    return GOOD, entries, 0


@kernel
def _read_gaps(
    data: Bytes,
    bit: np.uint64,
    stop: np.uint64,
    shift: np.uint64,
    width: np.uint64,
    before: int,
    elements: int,
    indices: Indices,
) -> tuple[int, int, int, np.uint64]:
    """Fill `indices` from the codes at `bit`; what is wrong, at which entry, the last index, the bit after them."""
    index = before
    for i in range(indices.size):
        gap, bit = _next_gap(data, bit, stop, shift, width)
        index += int(np.int64(gap)) + 1
        if bit > stop << U3:
            return ENDS_EARLY, i, index, bit
        if index >= elements:
            return PAST_THE_END, i, index, bit
        indices[i] = index
    return GOOD, indices.size, index, bit


@kernel
def read_rice(
    data: Bytes, at: int, stop: int, parameter: int, width: int, elements: int, entries: int, indices: Indices
) -> Outcome:
    """`indices[i]` is the index of entry i, out of the codes in [at, stop).  One read, one write."""
    last, shift, bits = np.uint64(stop), np.uint64(parameter), np.uint64(width)
    wrong, entry, index, bit = _read_gaps(
        data, np.uint64(at) << U3, last, shift, bits, -1, elements, indices[:entries]
    )
    if wrong != GOOD:
        return wrong, entry, index
    return _rice_end(data, bit, last, entries)


@kernel
def add_rice(
    data: Bytes,
    at: int,
    stop: int,
    parameter: int,
    width: int,
    entries: int,
    values_at: int,
    coding: int,
    scale: np.float32,
    out: Floats,
) -> Outcome:
    """`out[index] += value * scale` for every entry.  Memory: one read of the message, one cache line per entry.

    Block by block: the loop that adds is short, so that the CPU has many cache misses in flight.  Decoding each index just
    before its addition takes more than twice as long.
    """
    last, shift, bits = np.uint64(stop), np.uint64(parameter), np.uint64(width)
    bit, index = np.uint64(at) << U3, -1
    size = 4 if coding == FP32 else 2
    scratch = np.empty(min(entries, BLOCK), np.int32)
    values = np.empty(min(entries, BLOCK), np.float32)
    for start in range(0, entries, BLOCK):
        block = scratch[: min(BLOCK, entries - start)]
        wrong, entry, index, bit = _read_gaps(data, bit, last, shift, bits, index, out.size, block)
        if wrong != GOOD:
            return wrong, start + entry, index
        read_values(data, values_at + start * size, block.size, coding, values)
        for i in range(block.size):
            out[block[i]] += values[i] * scale
    return _rice_end(data, bit, last, entries)


@kernel
def read_u32(data: Bytes, at: int, elements: int, entries: int, indices: Indices) -> Outcome:
    """`indices[i]` is the index of entry i.  One read, one write."""
    place, previous = np.uint64(at), -1
    for i in range(entries):
        index = int(np.int64(load4(data, place)))
        place += U4
        if index >= elements:
            return PAST_THE_END, i, index
        if index <= previous:
            return NOT_ASCENDING, i, index
        indices[i] = index
        previous = index
    return GOOD, entries, 0


@kernel
def add_u32(
    data: Bytes, at: int, entries: int, values_at: int, coding: int, scale: np.float32, out: Floats
) -> Outcome:
    """`out[index] += value * scale` for every entry.  Memory: one read of the message, one cache line per entry."""
    place = np.uint64(at)
    values_place, step = np.uint64(values_at), U4 if coding == FP32 else U2
    previous = -1
    for i in range(entries):
        index = int(np.int64(load4(data, place)))
        place += U4
        if index >= out.size:
            return PAST_THE_END, i, index
        if index <= previous:
            return NOT_ASCENDING, i, index
        out[index] += read_value(data, values_place, coding) * scale
        values_place += step
        previous = index
    return GOOD, entries, 0


@kernel
def read_bitmap(data: Bytes, at: int, stop: int, elements: int, entries: int, indices: Indices) -> Outcome:
    """`indices[i]` is the index of entry i, out of the bits in [at, stop).  One read, one write."""
    count = 0
    last = np.uint64(stop)
    for start in range(at, stop, 8):
        word = load8(data, np.uint64(start), last)
        while word != U0:
            index = (start - at) * 8 + lowest_bit(word)
            word &= word - U1
            if index >= elements:
                return PAST_THE_END, count, index
            if count == entries:
                return TOO_MANY, count, index
            indices[count] = index
            count += 1
    return GOOD if count == entries else TOO_FEW, count, 0


@kernel
def add_bitmap(
    data: Bytes, at: int, stop: int, entries: int, values_at: int, coding: int, scale: np.float32, out: Floats
) -> Outcome:
    """`out[index] += value * scale` for every entry.  Memory: one read of the message, one cache line per entry."""
    count = 0
    last = np.uint64(stop)
    place, step = np.uint64(values_at), U4 if coding == FP32 else U2
    for start in range(at, stop, 8):
        word = load8(data, np.uint64(start), last)
        while word != U0:
            index = (start - at) * 8 + lowest_bit(word)
            word &= word - U1
            if index >= out.size:
                return PAST_THE_END, count, index
            if count == entries:
                return TOO_MANY, count, index
            out[index] += read_value(data, place, coding) * scale
            place += step
            count += 1
    return GOOD if count == entries else TOO_FEW, count, 0


@kernel
def add_all(data: Bytes, values_at: int, coding: int, scale: np.float32, out: Floats) -> None:
    """`out[i] += value * scale` for every element.  Memory: one read of the message, one pass over `out`."""
    place, step = np.uint64(values_at), U4 if coding == FP32 else U2
    for i in range(out.size):
        out[i] += read_value(data, place, coding) * scale
        place += step
