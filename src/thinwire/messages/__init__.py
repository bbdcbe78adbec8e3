"""Message format: header, index codings, value codings. `docs/message-format.md` is the specification."""

from thinwire.messages.header import (
    HEADER_BYTES,
    VERSION,
    Flag,
    Header,
    IndexCoding,
    ValueCoding,
    read_header,
    write_header,
)
from thinwire.messages.sparse import Packed, add_into, bound, decode_indices, expected, pack, rounded, unpack

__all__ = [
    "HEADER_BYTES",
    "VERSION",
    "Flag",
    "Header",
    "IndexCoding",
    "Packed",
    "ValueCoding",
    "add_into",
    "bound",
    "decode_indices",
    "expected",
    "pack",
    "read_header",
    "rounded",
    "unpack",
    "write_header",
]
