"""Headers: every field survives, and every wrong field is named."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.limits import CEILING
from thinwire.errors import MessageCoding, MessageError, MessageTruncated, MessageVersion
from thinwire.messages import HEADER_BYTES, Flag, Header, IndexCoding, ValueCoding, read_header, write_header

U32 = st.integers(0, 2**32 - 1)
GOOD = Header(IndexCoding.RICE, ValueCoding.FP16, Flag.CUT, 3, 70, 5)


@given(
    index=st.sampled_from(IndexCoding),
    values=st.sampled_from(ValueCoding),
    flags=st.sampled_from([Flag(0), Flag.NONFINITE, Flag.CUT, Flag.CUT | Flag.NONFINITE]),
    entries=U32,
    wanted=U32,
    payload=st.integers(0, 1000),
    padding=st.integers(0, 5),
)
def test_read_of_write(
    index: IndexCoding, values: ValueCoding, flags: Flag, entries: int, wanted: int, payload: int, padding: int
) -> None:
    header = Header(index, values, flags, entries, wanted, payload)
    buffer = np.full(HEADER_BYTES + payload + padding, 255, np.uint8)
    write_header(buffer, header)
    assert read_header(buffer) == header
    assert (buffer[HEADER_BYTES:] == 255).all()


@pytest.mark.parametrize(
    ("place", "byte", "error", "text"),
    [
        (0, 0, MessageVersion, "version: found 0"),
        (0, 2, MessageVersion, "version: found 2"),
        (1, 0x15, MessageCoding, "index coding: found 5"),
        (1, 0x1F, MessageCoding, "index coding: found 15"),
        (1, 0x43, MessageCoding, "value coding: found 4"),
        (2, 4, MessageVersion, "flags: found 0x0004"),
        (3, 128, MessageVersion, "flags: found 0x8002"),
        (12, 6, MessageTruncated, "payload: the header promises 6 bytes, the buffer has 5"),
        (15, 255, MessageTruncated, "payload: the header promises"),
    ],
)
def test_a_wrong_byte_is_named(place: int, byte: int, error: type[MessageError], text: str) -> None:
    buffer = np.zeros(HEADER_BYTES + 5, np.uint8)
    write_header(buffer, GOOD)
    buffer[place] = byte
    with pytest.raises(error, match=text):
        read_header(buffer)


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_short_buffer_has_no_header(size: int) -> None:
    with pytest.raises(MessageTruncated, match=f"{size} bytes"):
        read_header(np.ones(size, np.uint8))
    with pytest.raises(ValueError, match=f"{size} bytes"):
        write_header(np.ones(size, np.uint8), GOOD)


@pytest.mark.parametrize("field", ["entries", "wanted", "payload"])
def test_a_count_beyond_32_bits_is_not_written(field: str) -> None:
    counts = {"entries": 1, "wanted": 1, "payload": 1, field: 2**32}
    buffer = np.zeros(HEADER_BYTES, np.uint8)
    with pytest.raises(ValueError, match=f"{field}: 4294967296"):
        write_header(buffer, Header(IndexCoding.U32, ValueCoding.FP32, Flag(0), **counts))
    assert not buffer.any()


def test_importing_messages_does_not_import_numba() -> None:
    script = "import sys, thinwire.messages; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=CEILING, check=False).returncode == 0
