"""The 16-byte header of every gathered message (`docs/message-format.md`, section "Header")."""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import MessageCoding, MessageTruncated, MessageVersion

Bytes: TypeAlias = NDArray[np.uint8]

HEADER_BYTES = 16
VERSION = 1

# version, coding, flags, entries, wanted, payload
_LAYOUT = struct.Struct("<BBHIII")
_LARGEST = 2**32 - 1


class IndexCoding(IntEnum):
    """Encoding of the indices; the low nibble of the coding byte."""

    OPAQUE = 0  # the payload belongs to the codec
    BITMAP = 1
    U32 = 2
    RICE = 3
    ALL = 4  # every element, in order: no indices


class ValueCoding(IntEnum):
    """Encoding of the values; the high nibble of the coding byte."""

    NONE = 0
    FP32 = 1
    FP16 = 2
    BF16 = 3

    @property
    def bytes(self) -> int:
        """Bytes per value."""
        return (0, 4, 2, 2)[self]


class Flag(IntFlag):
    """Flags that a rank sends with its entries."""

    NONFINITE = 1  # this rank's gradient holds a NaN or an infinity: the step is void
    CUT = 2  # some entries exceeded the capacity and stayed in the residual


_KNOWN_FLAGS = int(Flag.NONFINITE | Flag.CUT)


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header.  `wanted` counts the header, `payload` does not."""

    index: IndexCoding
    values: ValueCoding
    flags: Flag
    entries: int
    wanted: int  # bytes of the uncut message; a request for capacity, decoders do not rely on it
    payload: int  # bytes after the header that belong to the message; the rest of the buffer is padding


def write_header(buffer: Bytes, header: Header) -> None:
    """Write `header` into the first 16 bytes of `buffer` (uint8, contiguous)."""
    if len(buffer) < HEADER_BYTES:
        raise ValueError(f"buffer: {len(buffer)} bytes, a header takes {HEADER_BYTES}")
    for field in ("entries", "wanted", "payload"):
        count = getattr(header, field)
        if not 0 <= count <= _LARGEST:
            raise ValueError(f"{field}: {count} does not fit 32 bits; cut the group into smaller ones")
    coding = header.index | header.values << 4
    _LAYOUT.pack_into(buffer.data, 0, VERSION, coding, header.flags, header.entries, header.wanted, header.payload)


def read_header(buffer: Bytes) -> Header:
    """Read and check the header of the message in `buffer` (uint8, contiguous, padding allowed at its end).

    Raises `MessageTruncated`, `MessageVersion` or `MessageCoding`.  What only the group's size can tell, such as more
    entries than elements, is checked by the decoders in `sparse.py`.
    """
    if len(buffer) < HEADER_BYTES:
        raise MessageTruncated(f"header: the buffer has {len(buffer)} bytes, a header takes {HEADER_BYTES}")
    version, coding, flags, entries, wanted, payload = _LAYOUT.unpack_from(buffer.data, 0)
    if version != VERSION:
        raise MessageVersion(f"version: found {version}, this thinwire reads {VERSION}")
    try:
        index = IndexCoding(coding & 15)
    except ValueError:
        known = ", ".join(f"{choice.value} {choice.name}" for choice in IndexCoding)
        raise MessageCoding(f"index coding: found {coding & 15}, known are {known}") from None
    try:
        values = ValueCoding(coding >> 4)
    except ValueError:
        known = ", ".join(f"{choice.value} {choice.name}" for choice in ValueCoding)
        raise MessageCoding(f"value coding: found {coding >> 4}, known are {known}") from None
    if flags & ~_KNOWN_FLAGS:
        raise MessageVersion(f"flags: found {flags:#06x}, version {VERSION} has only the bits {_KNOWN_FLAGS:#06x}")
    room = len(buffer) - HEADER_BYTES
    if payload > room:
        raise MessageTruncated(f"payload: the header promises {payload} bytes, the buffer has {room} after the header")
    return Header(index, values, Flag(flags), entries, wanted, payload)
