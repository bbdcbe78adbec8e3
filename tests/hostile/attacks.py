"""Ways to spoil what others wrote: bytes of a message or a file, values of a JSON text, words of a text for people."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Random = np.random.Generator
Bytes = NDArray[np.uint8]

# Fields of the header of a message: place and width.
FIELDS = [(0, 1), (1, 1), (2, 2), (4, 4), (8, 4), (12, 4)]


def pick(random: Random, choices: list[Any]) -> Any:
    return choices[int(random.integers(len(choices)))]


class Escaped(AssertionError):
    """Something else than a named error came of `given`."""

    def __init__(self, message: str, given: object) -> None:
        super().__init__(message)
        self.given = given


# -- bytes, in place ---------------------------------------------------------------------------------------------------


def field(random: Random, data: Bytes) -> None:
    """One field of the header, to a number that is nearly right or absurd."""
    if len(data) < 16:
        return
    place, width = pick(random, FIELDS)
    now = int.from_bytes(data[place : place + width].tobytes(), "little")
    lies = [now - 1, now + 1, now * 2, 0, 1, 2**31, 2**32 - 1, int(random.integers(2**32)), int(random.integers(300))]
    lie = pick(random, lies) % 2 ** (8 * width)
    data[place : place + width] = np.frombuffer(lie.to_bytes(width, "little"), np.uint8)


def flips(random: Random, data: Bytes) -> None:
    for _ in range(int(random.integers(1, 9))):
        if len(data):
            data[random.integers(len(data))] ^= 1 << random.integers(8)


def words(random: Random, data: Bytes) -> None:
    """Four bytes somewhere that are a number at its limit: a count, an index, a value."""
    limits = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0x7FC00000, 0xFF7FFFFF, 1, 0x00007FFF, 0xFFFF]
    for _ in range(int(random.integers(1, 4))):
        if len(data) >= 4:
            at = int(random.integers(len(data) - 3))
            data[at : at + 4] = np.frombuffer(struct.pack("<I", pick(random, limits)), np.uint8)


def noise(random: Random, data: Bytes) -> None:
    """A run of random bytes, often behind the header, sometimes everything."""
    start = int(pick(random, [0, min(16, len(data)), random.integers(len(data) + 1)]))
    stop = int(random.integers(start, len(data) + 1))
    data[start:stop] = random.integers(0, 256, stop - start, dtype=np.uint8)


def flood(random: Random, data: Bytes) -> None:
    """A run of equal bytes."""
    start = int(random.integers(len(data) + 1))
    data[start : start + int(random.integers(1, 200))] = pick(random, [0, 255, 1, 128])


def shift(random: Random, data: Bytes) -> None:
    """A byte too many or too few: everything behind it has moved."""
    if len(data) > 2:
        at = int(random.integers(len(data) - 1))
        data[at:] = np.roll(data[at:], pick(random, [1, -1, 4]))


ON_BYTES: list[Callable[[Random, Bytes], None]] = [field, field, flips, words, noise, flood, shift]


def spoil(random: Random, data: Bytes) -> str:
    """Spoil bytes in place, once or twice; the names of what was done."""
    done = [pick(random, ON_BYTES) for _ in range(int(random.integers(1, 3)))]
    for attack in done:
        attack(random, data)
    return " ".join(attack.__name__ for attack in done)


def spoil_file(random: Random, content: bytes) -> bytes:
    """A file with other bytes, or more, or fewer of them."""
    data = np.frombuffer(content, np.uint8).copy()
    kind = int(random.integers(6))
    if kind == 0:
        return random.integers(0, 256, int(random.integers(200)), dtype=np.uint8).tobytes()
    if kind == 1:
        return data[: int(random.integers(len(data) + 1))].tobytes()
    if kind == 2:
        at = int(random.integers(len(data) + 1))
        extra = random.integers(0, 256, int(random.integers(1, 20)), dtype=np.uint8)
        return np.concatenate([data[:at], extra, data[at:]]).tobytes()
    spoil(random, data)
    return data.tobytes()


# -- JSON --------------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, 1e-320, math.inf, math.nan, "",
    "0", "nan", "dense", "topk(density=0.5)", "__import__('os')", "\x00", "é\ud7ff", "../../x", "x" * 10_000, [], {},
    [[[[]]]], [0] * 1000, {"": {}}, {"rank0": 1},
]  # fmt: skip


def spoil_json(random: Random, text: str) -> str:
    """Valid JSON with some values, keys or types exchanged, removed or repeated; sometimes nested without end."""
    if random.random() < 0.02:
        deep = int(pick(random, [100, 3000, 100_000]))
        return pick(random, ["[", '{"format":']) * deep
    value = json.loads(text)
    for _ in range(int(random.integers(1, 4))):
        value = _bend(random, value)
    return json.dumps(value)


def spoil_json_file(random: Random, content: bytes) -> bytes:
    """A file with JSON in it: other values, or other bytes."""
    if random.random() < 0.7:
        return spoil_json(random, content.decode()).encode()
    return spoil_file(random, content)


def _bend(random: Random, value: Any) -> Any:
    """One change, at a random place of the tree."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = pick(random, list(value))
        chance = random.random()
        if chance < 0.08:
            return {other: part for other, part in value.items() if other != key}
        if chance < 0.12:
            return {**value, pick(random, ["extra", "", "0", key + "x"]): value[key]}
        return {**value, key: _bend(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        at = int(random.integers(len(value)))
        chance = random.random()
        if chance < 0.1:
            return value[:at] + value[at + 1 :]
        if chance < 0.2:
            return value[: at + 1] + value[at:]
        return [*value[:at], _bend(random, value[at]), *value[at + 1 :]]
    if isinstance(value, bool) or value is None or random.random() < 0.5:
        return pick(random, ODD)
    if isinstance(value, int | float):
        return pick(random, [value + 1, value - 1, -value, value * 1000, value / 2, 0])
    if isinstance(value, str):
        return spoil_text(random, value)
    return pick(random, ODD)


# -- texts -------------------------------------------------------------------------------------------------------------

SNIPPETS = [
    "(", ")", ",", "=", "density", "density=", "-1", "0", "1e400", "nan", "inf", "1" * 5000, "None", "True", "'", '"',
    "via", " via ", "comp", "dec", "fAR", "@cpu", "\x00", "\n", "é", "\U0001f600", "lambda: 0", "9**9**9", "[0]*9**9",
    "__import__('os').system('false')", "Warmup(to=0.01, steps=5)", "Warmup()", "**{}", "*[1]", "{}", "()", "-" * 3000,
    "(" * 3000, "updates(", "%s", "\\", "#",
]  # fmt: skip


def spoil_text(random: Random, text: str) -> str:
    for _ in range(int(random.integers(1, 4))):
        at, to = sorted(int(i) for i in random.integers(0, len(text) + 1, 2))
        kind = int(random.integers(4))
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + pick(random, SNIPPETS) + text[to:]
        elif kind == 2:
            text = text[:at] + chr(int(random.integers(1, 0x300))) + text[at:]
        else:
            text = text[:to] + text[at:to] + text[to:]
    return text
