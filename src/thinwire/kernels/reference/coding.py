"""Index and value codings of messages, in plain Python and torch.  `docs/message-format.md` is the specification.

Bits are kept as a text of 0 and 1, the first bit of the stream first.  Entries are already cut: these functions see
only those that are sent.  `width` is the number of bits of the largest possible gap, elements - 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LIMIT = 16
LARGEST_PARAMETER = 31
FP32, FP16, BF16 = 1, 2, 3  # as in the header
TYPES = {FP32: torch.float32, FP16: torch.float16, BF16: torch.bfloat16}


def rounded(values: Tensor, coding: int) -> Tensor:
    """Values as decoded by the receiver: unchanged, or rounded to nearest and saturated, infinities too."""
    if coding == FP32:
        return values.clone()
    largest = torch.finfo(TYPES[coding]).max
    return values.clamp(-largest, largest).to(TYPES[coding]).float()


def take_rounded(residual: Tensor, indices: Tensor, coding: int, limit: float) -> tuple[Tensor, Tensor]:
    """Take the elements rounded to 16 bits, within +-limit; their words, and these widened to float32."""
    found = residual[indices.long()]
    words = found.clamp(-limit, limit).to(TYPES[coding])
    residual[indices.long()] = found - words.float()
    return words, words.float()


def write_values(values: Tensor, coding: int) -> bytes:
    """The bytes of the values in a message."""
    words = torch.int32 if coding == FP32 else torch.int16
    size = 4 if coding == FP32 else 2
    bits = rounded(values, coding).to(TYPES[coding]).view(words)
    return b"".join(word.to_bytes(size, "little", signed=True) for word in bits.tolist())


def read_values(data: bytes, coding: int) -> Tensor:
    """Float32 values out of the bytes of a message."""
    words = torch.int32 if coding == FP32 else torch.int16
    size = 4 if coding == FP32 else 2
    bits = [int.from_bytes(data[i : i + size], "little", signed=True) for i in range(0, len(data), size)]
    return torch.tensor(bits, dtype=words).view(TYPES[coding]).float()


def gaps(indices: Sequence[int]) -> list[int]:
    """How many elements lie between an entry and the one before it; the first entry follows element -1."""
    return [index - before - 1 for before, index in zip([-1, *indices], indices, strict=False)]


def code(gap: int, parameter: int, width: int) -> str:
    """The bits of one gap: quotient in unary, a one, remainder, lowest bit first; or sixteen zeros and the gap."""
    quotient, rest = divmod(gap, 1 << parameter)
    if quotient >= LIMIT:
        return "0" * LIMIT + _bits(gap, width)
    return "0" * quotient + "1" + _bits(rest, parameter)


def rice_bits(indices: Sequence[int], parameter: int, width: int) -> int:
    """Bits of the entries in Rice coding."""
    return sum(len(code(gap, parameter, width)) for gap in gaps(indices))


def rice_parameter(indices: Sequence[int], parameter: int, width: int) -> tuple[int, int]:
    """The best parameter downhill from `parameter`, upwards first, and its bits."""
    costs = [rice_bits(indices, p, width) for p in range(LARGEST_PARAMETER + 1)]
    best = parameter
    while best < LARGEST_PARAMETER and costs[best + 1] < costs[best]:
        best += 1
    if best == parameter:
        while best > 0 and costs[best - 1] < costs[best]:
            best -= 1
    return best, costs[best]


def rice_room(indices: Sequence[int], start: int, room: int, value_bits: int, parameter: int, width: int) -> int:
    """How many of the entries that end, cyclically, before position `start` fit `room` bits."""
    fits = 0
    for kept in range(1, len(indices)):
        chosen = sorted(indices[(start - 1 - i) % len(indices)] for i in range(kept))
        if rice_bits(chosen, parameter, width) + kept * value_bits <= room:
            fits = kept
    return fits


def write_rice(indices: Sequence[int], parameter: int, width: int) -> bytes:
    """The codes of all entries, filled up with zeros to whole bytes."""
    return _pack("".join(code(gap, parameter, width) for gap in gaps(indices)))


def read_rice(data: bytes, entries: int, parameter: int, width: int) -> list[int]:
    """The indices out of the codes of a well-formed message."""
    stream = "".join(_bits(byte, 8) for byte in data)
    at, index, indices = 0, -1, []
    for _ in range(entries):
        quotient = stream.index("1", at) - at if "1" in stream[at : at + LIMIT] else LIMIT
        if quotient == LIMIT:
            gap = _number(stream[at + LIMIT : at + LIMIT + width])
            at += LIMIT + width
        else:
            rest = stream[at + quotient + 1 : at + quotient + 1 + parameter]
            gap = (quotient << parameter) + _number(rest)
            at += quotient + 1 + parameter
        index += gap + 1
        indices.append(index)
    return indices


def write_u32(indices: Sequence[int]) -> bytes:
    """Four bytes per index, little endian."""
    return b"".join(index.to_bytes(4, "little") for index in indices)


def write_bitmap(indices: Sequence[int], elements: int) -> bytes:
    """One bit an element, the lowest bit of a byte first."""
    chosen = set(indices)
    return _pack("".join("1" if index in chosen else "0" for index in range(elements)))


def _bits(number: int, width: int) -> str:
    """The lowest bit first."""
    return "".join(str(number >> i & 1) for i in range(width))


def _number(bits: str) -> int:
    return sum(int(bit) << i for i, bit in enumerate(bits))


def _pack(bits: str) -> bytes:
    return bytes(_number(bits[i : i + 8]) for i in range(0, len(bits), 8))
