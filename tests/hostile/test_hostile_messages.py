"""Hostile messages raise a named error, and never touch what is not theirs."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hostile import mutator
from tests.support.limits import CEILING
from thinwire.errors import MessageCoding, MessageCount, MessageError, MessageIndex, MessageLength, MessageTruncated
from thinwire.messages import (
    HEADER_BYTES,
    Flag,
    Header,
    IndexCoding,
    ValueCoding,
    add_into,
    decode_indices,
    unpack,
    write_header,
)

NAMES = {error.__name__ for error in MessageError.__subclasses__()}


def test_a_hundred_thousand_hostile_messages() -> None:
    outcomes = mutator.storm(seed=20, count=100_000)
    assert sum(outcomes.values()) >= 200_000  # every message is decoded by at least two of the decoders
    assert {outcome for _, outcome in outcomes} == NAMES | {"valid"}
    for mutation, must_raise in [
        ("truncated", "MessageTruncated"),
        ("wrong_version", "MessageVersion"),
        ("wrong_coding", "MessageCoding"),
        ("count_too_large", "MessageCount"),
        ("index_out_of_range", "MessageIndex"),
        ("gaps_past_the_end", "MessageIndex"),
        ("gaps_past_the_end", "MessageLength"),
        ("lying_payload", "MessageLength"),
        ("lying_payload", "MessageTruncated"),
        ("wrong_indices", "MessageCount"),
        ("wrong_indices", "MessageIndex"),
        ("wrong_indices", "MessageLength"),
    ]:
        assert outcomes[mutation, must_raise] > 100, (mutation, must_raise)
    assert not outcomes["truncated", "valid"]
    assert not outcomes["count_too_large", "valid"]


def test_nothing_is_read_out_of_bounds(tmp_path: Path) -> None:
    # the disk cache of kernels does not know about the bounds check: a cache of its own
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, mutator.__file__, "21", "20000"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CEILING,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 40_000


def message(index: IndexCoding, values: ValueCoding, entries: int, payload: bytes, padding: bytes = b"") -> np.ndarray:
    buffer = np.zeros(HEADER_BYTES, np.uint8)
    write_header(buffer, Header(index, values, Flag(0), entries, 0, len(payload)))
    return np.concatenate([buffer, np.array(list(payload + padding), np.uint8)])


ONE = b"\x00\x00\x80\x3f"  # 1.0
BITMAP, U32, RICE, ALL = IndexCoding.BITMAP, IndexCoding.U32, IndexCoding.RICE, IndexCoding.ALL


@pytest.mark.parametrize(
    ("index", "entries", "index_bytes", "error", "text"),
    [
        (U32, 11, bytes(44), MessageCount, "entries: found 11, the group has 10"),
        (U32, 1, b"\x0a\0\0\0", MessageIndex, "entry 0: found 10, the group has 10"),
        (U32, 1, b"\xff\xff\xff\xff", MessageIndex, "entry 0: found 4294967295"),
        (U32, 2, b"\3\0\0\0\3\0\0\0", MessageIndex, "entry 1: found 3, which is not greater"),
        (U32, 2, b"\3\0\0\0\2\0\0\0", MessageIndex, "entry 1: found 2, which is not greater"),
        (U32, 1, b"\3\0\0", MessageLength, "found 3 bytes, 1 entries in U32 and NONE take 4"),
        (U32, 1, b"\3\0\0\0\0", MessageLength, "found 5 bytes"),
        (BITMAP, 2, b"\x07\0", MessageCount, "the header says 2, the bitmap has more"),
        (BITMAP, 4, b"\x07\0", MessageCount, "the header says 4, the bitmap has 3"),
        (BITMAP, 1, b"\0\x04", MessageIndex, "entry 0: found 10"),
        (BITMAP, 3, b"\x07", MessageLength, "found 1 bytes"),
        (ALL, 9, b"", MessageCount, "found 9, index coding ALL has 10"),
        (ALL, 10, b"\0", MessageLength, "found 1 bytes"),
        (RICE, 0, b"", MessageLength, "found 0 bytes"),
        (RICE, 1, b"\x20\x01", MessageCoding, "Rice parameter: found 32"),
        (RICE, 1, b"\x03", MessageLength, "1 bytes end within entry 0 of 1"),
        (RICE, 3, b"\x00\x03", MessageLength, "2 bytes end within entry 2 of 3"),
        (RICE, 2, b"\x00\x10\x04", MessageIndex, "entry 1: found 10"),
        (RICE, 1, b"\x00\x00\x04", MessageIndex, "entry 0: found 10"),
        (RICE, 1, b"\x00\x00\x00\x0a", MessageIndex, "entry 0: found 10"),
        (RICE, 1, b"\x1f\xff\xff\xff\xff", MessageIndex, "entry 0: found 2147483647"),
        (RICE, 1, b"\x00\x01\x00", MessageLength, "end before byte 2"),
        (RICE, 1, b"\x00\x03", MessageLength, "zeros up to the next byte"),
        (RICE, 0, b"\x00\x00", MessageLength, "end before byte 1"),
    ],
)
def test_a_lie_is_named(
    index: IndexCoding, entries: int, index_bytes: bytes, error: type[MessageError], text: str
) -> None:
    elements = 10
    without = message(index, ValueCoding.NONE, entries, index_bytes, padding=b"\xff" * 9)
    with pytest.raises(error, match=text):
        decode_indices(without, elements, np.empty(elements, np.int32))
    with_values = message(index, ValueCoding.FP32, entries, ONE * entries + index_bytes, padding=b"\xff" * 9)
    with pytest.raises(error):
        unpack(with_values, elements, np.empty(elements, np.int32), np.empty(elements, np.float32))
    with pytest.raises(error):
        add_into(with_values, np.zeros(elements, np.float32), 1.0)


def test_a_payload_beyond_the_buffer_is_named() -> None:
    good = message(U32, ValueCoding.FP32, 1, ONE + b"\3\0\0\0")
    for size in range(len(good)):
        with pytest.raises(MessageTruncated):
            add_into(good[:size], np.zeros(10, np.float32), 1.0)


def test_padding_may_hold_anything() -> None:
    out = np.zeros(10, np.float32)
    for index, index_bytes in ((U32, b"\3\0\0\0"), (BITMAP, b"\x08\0"), (RICE, b"\x00\x08"), (RICE, b"\0\0\0\3")):
        add_into(message(index, ValueCoding.FP32, 1, ONE + index_bytes, padding=b"\xff" * 9), out, 1.0)
    assert out.tolist() == [0, 0, 0, 4, 0, 0, 0, 0, 0, 0]
