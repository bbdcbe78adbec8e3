"""The worked examples of docs/message-format.md are what the code writes and reads."""

import re
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import MessageError
from thinwire.messages import (
    HEADER_BYTES,
    IndexCoding,
    ValueCoding,
    add_into,
    decode_indices,
    pack,
    read_header,
    unpack,
)

PAGE = (Path(__file__).parents[2] / "docs" / "message-format.md").read_text()
HEX_LINE = re.compile(r"((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)")


def examples() -> list[tuple[dict[str, str], bytes]]:
    """The fields and the bytes of every example on the page."""
    found = []
    for block in re.findall(r"```message\n(.*?)```", PAGE, re.DOTALL):
        fields: dict[str, str] = {}
        message = b""
        for line in block.splitlines():
            if match := HEX_LINE.match(line):
                message += bytes.fromhex(match.group(1))
            else:
                name, _, text = line.partition(" ")
                fields[name] = text.strip()
        found.append((fields, message))
    return found


EXAMPLES = examples()
each_example = pytest.mark.parametrize(("fields", "message"), EXAMPLES, ids=map(str, range(len(EXAMPLES))))


def numbers(fields: dict[str, str], name: str, kind: type[np.generic]) -> np.ndarray:
    return np.array([float(word) for word in fields[name].split()]).astype(kind)


def test_the_page_shows_every_coding() -> None:
    headers = [read_header(np.frombuffer(message, np.uint8)) for _, message in EXAMPLES]
    assert {header.index for header in headers} == set(IndexCoding) - {IndexCoding.OPAQUE}
    assert {header.values for header in headers} == set(ValueCoding)
    assert len(EXAMPLES) == PAGE.count("```message")


@each_example
def test_example_is_written(fields: dict[str, str], message: bytes) -> None:
    values = numbers(fields, "values", np.float32) if "values" in fields else None
    buffer = np.zeros(int(fields.get("capacity", 64)), np.uint8)
    result = pack(
        numbers(fields, "indices", np.int32),
        values,
        int(fields["elements"]),
        buffer,
        ValueCoding[fields["coding"]],
        int(fields.get("rotation", 0)),
        fields.get("finite") != "no",
    )
    assert buffer[: result.size].tobytes().hex(" ") == message.hex(" ")


@each_example
def test_example_is_read(fields: dict[str, str], message: bytes) -> None:
    buffer = np.array(list(message), np.uint8)
    elements = int(fields["elements"])
    sent = numbers(fields, "sent" if "sent" in fields else "indices", np.int32)
    indices, values = np.empty(64, np.int32), np.empty(64, np.float32)
    if fields["coding"] == "NONE":
        header = decode_indices(buffer, elements, indices)
    else:
        header = unpack(buffer, elements, indices, values)
        arrives = numbers(fields, "arrives" if "arrives" in fields else "values", np.float32)
        assert values[: header.entries].tolist() == arrives.tolist()
        out = np.zeros(elements, np.float32)
        add_into(buffer, out, 1.0)
        assert out[sent].tolist() == arrives.tolist()
    assert indices[: header.entries].tolist() == sent.tolist()
    assert header.payload == len(message) - HEADER_BYTES


def test_the_page_names_every_error() -> None:
    for error in MessageError.__subclasses__():
        assert f"`{error.__name__}`" in PAGE
