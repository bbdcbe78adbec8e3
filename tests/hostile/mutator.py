"""Hostile messages from a seed: good ones that are cut, bent or lied about, and plain garbage.

`storm` decodes them and holds the decoders to their word.  As a program, `NUMBA_BOUNDSCHECK=1 python mutator.py SEED
COUNT`, it first shows that Numba's bounds check is on.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from thinwire.errors import MessageError
from thinwire.messages import (
    HEADER_BYTES,
    Header,
    IndexCoding,
    ValueCoding,
    add_into,
    bound,
    decode_indices,
    pack,
    read_header,
    unpack,
)

Generator = np.random.Generator
GUARD = 64
UNTOUCHED = -7


def good_messages(random: Generator, count: int) -> list[tuple[np.ndarray, int]]:
    """Messages as `pack` writes them, and the elements they are about; all codings, sizes from 0 on."""
    messages = []
    for _ in range(count):
        elements = int(random.choice([0, 1, 2, 7, 16, 17, 64, 100, 1000, 5000, 2**20]))
        most = min(elements, 60) if random.random() < 0.8 else min(elements, 1000)
        entries = int(random.integers(0, most + 1))
        indices = np.sort(random.choice(elements, entries, replace=False)).astype(np.int32)
        coding = ValueCoding(int(random.integers(0, 4)))
        values = None if coding is ValueCoding.NONE else random.standard_normal(entries).astype(np.float32)
        capacity = bound(elements, entries, coding)
        if random.random() < 0.2:
            capacity = int(random.integers(HEADER_BYTES, capacity + 1))
        buffer = np.zeros(capacity, np.uint8)
        size = pack(indices, values, elements, buffer, coding, int(random.integers(0, 99))).size
        messages.append((buffer[:size].copy(), elements))
    return messages


def _field(message: np.ndarray, place: int, number: int) -> None:
    message[place : place + 4] = np.frombuffer(np.uint32(number % 2**32).tobytes(), np.uint8)


def _index_start(header: Header) -> int:
    return min(HEADER_BYTES + header.entries * header.values.bytes, HEADER_BYTES + header.payload)


def truncated(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    return message[: int(random.integers(0, len(message)))]


def wrong_version(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    message[0] = random.integers(0, 256)
    return message


def wrong_coding(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    message[1] = random.integers(0, 256)
    return message


def another_coding(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    message[1] = random.integers(1, 5) | random.integers(0, 4) << 4
    return message


def wrong_flags(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    message[2:4] = random.integers(0, 256, 2)
    return message


def wrong_count(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    entries = read_header(message).entries
    choices = [entries - 1, entries + 1, elements, elements + 1, 2**31, 2**32 - 1, int(random.integers(0, 2**32))]
    _field(message, 4, choices[random.integers(len(choices))])
    return message


def count_too_large(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    """And a buffer that would hold it, so that only the number of elements can tell."""
    header = read_header(message)
    entries = elements + int(random.integers(1, 50))
    payload = entries * (header.values.bytes + 4)
    grown = np.zeros(HEADER_BYTES + payload, np.uint8) if payload < 100_000 else message
    grown[: min(len(message), len(grown))] = message[: len(grown)]
    grown[1] = header.values << 4 | IndexCoding.U32
    _field(grown, 4, entries)
    _field(grown, 12, payload)
    return grown


def index_out_of_range(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    """U32 indices, one of them wrong."""
    entries = int(random.integers(1, 20))
    values = ValueCoding(int(random.integers(0, 4)))
    lie = np.zeros(HEADER_BYTES + entries * (values.bytes + 4), np.uint8)
    lie[0], lie[1] = 1, values << 4 | IndexCoding.U32
    _field(lie, 4, entries)
    _field(lie, 12, len(lie) - HEADER_BYTES)
    start = HEADER_BYTES + entries * values.bytes
    for i in range(entries):
        _field(lie, start + 4 * i, i * max(elements // entries, 1))
    wrong = [elements, elements + 1, 2**31 - 1, 2**31, 2**32 - 1, int(random.integers(0, 2**32))]
    _field(lie, start + 4 * int(random.integers(entries)), wrong[random.integers(len(wrong))])
    return lie


def gaps_past_the_end(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    """Rice codes of random bits, thin enough that escapes are common."""
    values = ValueCoding(int(random.integers(0, 4)))
    entries = int(random.integers(1, 20))
    stream = random.integers(0, 256, int(random.integers(0, 8 * entries)), dtype=np.uint8)
    stream[random.random(len(stream)) < 0.5] = 0
    start = HEADER_BYTES + entries * values.bytes
    lie = np.zeros(start + 1 + len(stream), np.uint8)
    lie[0], lie[1] = 1, values << 4 | IndexCoding.RICE
    _field(lie, 4, entries)
    _field(lie, 12, len(lie) - HEADER_BYTES)
    lie[start] = random.integers(0, 34)
    lie[start + 1 :] = stream
    return lie


def lying_payload(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    payload = read_header(message).payload
    choices = [payload - 1, payload + 1, 0, 2**31, 2**32 - 1, 2**32 - 16, int(random.integers(0, payload + 9))]
    _field(message, 12, choices[random.integers(len(choices))])
    return np.concatenate([message, np.zeros(int(random.integers(0, 9)), np.uint8)])


def wrong_indices(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    """Bits turned in the index bytes: bitmaps with another count, codes that run on, a parameter out of range."""
    start = _index_start(read_header(message))
    if start < len(message):
        for _ in range(int(random.integers(1, 4))):
            message[random.integers(start, min(len(message), start + 4))] ^= 1 << random.integers(8)
            message[random.integers(start, len(message))] ^= 1 << random.integers(8)
    return message


def bit_flips(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    for _ in range(int(random.integers(1, 9))):
        message[random.integers(len(message))] ^= 1 << random.integers(8)
    return message


def garbage(random: Generator, message: np.ndarray, elements: int) -> np.ndarray:
    noise = random.integers(0, 256, int(random.integers(0, 64)), dtype=np.uint8)
    if len(noise) >= HEADER_BYTES and random.random() < 0.8:
        noise[:4] = message[:4]
        _field(noise, 4, int(random.integers(0, elements + 2)))
        _field(noise, 12, int(random.integers(0, len(noise) - HEADER_BYTES + 1)))
    return noise


MUTATIONS: list[Callable[[Generator, np.ndarray, int], np.ndarray]] = [
    truncated,
    wrong_version,
    wrong_coding,
    another_coding,
    wrong_flags,
    wrong_count,
    count_too_large,
    index_out_of_range,
    gaps_past_the_end,
    lying_payload,
    wrong_indices,
    bit_flips,
    garbage,
]


def hostile(seed: int, count: int) -> Iterator[tuple[str, np.ndarray, int]]:
    """`count` hostile messages: the name of the mutation, the bytes, the elements that the decoder believes in."""
    random = np.random.default_rng(seed)
    good = good_messages(random, 300)
    for i in range(count):
        message, elements = good[random.integers(len(good))]
        mutation = MUTATIONS[i % len(MUTATIONS)]
        yield mutation.__name__, mutation(random, message.copy(), elements), elements


class Guarded:
    """An array between two guards that nobody may touch."""

    def __init__(self, size: int, dtype: type[np.generic]) -> None:
        self.everything = np.full(size + 2 * GUARD, UNTOUCHED, dtype)
        self.array = self.everything[GUARD : GUARD + size]

    def renew(self) -> np.ndarray:
        self.array[:] = UNTOUCHED
        return self.array

    def intact(self) -> bool:
        return bool((self.everything[:GUARD] == UNTOUCHED).all() and (self.everything[-GUARD:] == UNTOUCHED).all())


def attempt(decode: Callable[[], Header]) -> tuple[str, Header | None]:
    """The name of the error, or "valid" and the header; an error of any other kind passes through."""
    try:
        return "valid", decode()
    except MessageError as error:
        return type(error).__name__, None


def storm(seed: int, count: int) -> Counter[tuple[str, str]]:
    """Decode `count` hostile messages; counts (mutation, outcome).  Anything but a named error is a failure."""
    outcomes: Counter[tuple[str, str]] = Counter()
    vectors: dict[int, tuple[Guarded, Guarded, Guarded]] = {}
    for name, message, elements in hostile(seed, count):
        if elements not in vectors:
            room = min(elements, 2000)
            vectors[elements] = Guarded(room, np.int32), Guarded(room, np.float32), Guarded(elements, np.float32)
        places, values, sums = vectors[elements]
        indices = places.renew()
        out = sums.array if elements > 10_000 else sums.renew()
        results = {
            "unpack": attempt(lambda: unpack(message, elements, indices, values.array)),  # noqa: B023
            "add_into": attempt(lambda: add_into(message, out, 0.0)),  # noqa: B023
        }
        if "MessageCoding" in results["unpack"][0]:
            indices = places.renew()
            results["decode_indices"] = attempt(lambda: decode_indices(message, elements, indices))  # noqa: B023
        for guarded in (places, values, sums):
            assert guarded.intact(), f"{name}: written out of bounds"
        for which, (outcome, header) in results.items():
            outcomes[name, outcome] += 1
            if header is not None and which != "add_into":
                found = indices[: header.entries].astype(np.int64)
                assert (np.diff(found, prepend=-1) > 0).all(), f"{name}: {which} indices do not ascend"
                assert (found < elements).all(), f"{name}: {which} index past the end"
                assert (indices[header.entries :] == UNTOUCHED).all(), f"{name}: {which} wrote more than its entries"
        if elements <= 2000:
            assert results["unpack"][0] == results["add_into"][0], f"{name}: {results}"
    return outcomes


def assert_bounds_are_checked() -> None:
    """A kernel that is lied to by its caller must raise; without the check it would write past the array."""
    from thinwire.kernels.cpu import coding

    try:
        coding.read_u32(np.zeros(4, np.uint8), 0, 10, 1, np.zeros(0, np.int32))
    except IndexError:
        return
    raise AssertionError("Numba's bounds check is off")


if __name__ == "__main__":
    assert_bounds_are_checked()
    print(sum(storm(int(sys.argv[1]), int(sys.argv[2])).values()))
