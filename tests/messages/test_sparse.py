"""Sparse messages: unpack of pack, cuts that conserve every entry, bounds that hold."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import MessageCoding, MessageCount
from thinwire.messages import (
    HEADER_BYTES,
    Flag,
    Header,
    IndexCoding,
    Packed,
    ValueCoding,
    add_into,
    bound,
    decode_indices,
    expected,
    pack,
    read_header,
    rounded,
    unpack,
    write_header,
)

unhurried = settings(deadline=None)  # the first call of a kernel compiles it
CODINGS = st.sampled_from(ValueCoding)
WITH_VALUES = st.sampled_from([ValueCoding.FP32, ValueCoding.FP16, ValueCoding.BF16])


def some_values(count: int) -> np.ndarray:
    return (np.random.default_rng(count).standard_normal(count) * 1000).astype(np.float32)


@st.composite
def supports(draw: st.DrawFn, largest: int = 300) -> tuple[np.ndarray, int]:
    """Ascending indices and the number of elements: empty, full, single, random, clustered."""
    elements = draw(st.integers(0, 3) | st.integers(0, largest))
    if elements and draw(st.booleans()):
        places = draw(st.sets(st.integers(0, elements - 1)))
        if draw(st.booleans()):
            first = draw(st.integers(0, elements - 1))
            places |= set(range(first, min(first + 50, elements)))
    else:
        places = set(range(elements)) if draw(st.booleans()) else set()
    return np.array(sorted(places), np.int32), elements


def packed(indices: np.ndarray, elements: int, coding: ValueCoding, capacity: int, rotation: int = 0) -> tuple:
    values = None if coding is ValueCoding.NONE else some_values(indices.size)
    buffer = np.full(capacity, 0xA5, np.uint8)
    return pack(indices, values, elements, buffer, coding, rotation), values, buffer


def entries_of(buffer: np.ndarray, elements: int, coding: ValueCoding) -> tuple[Header, np.ndarray, np.ndarray | None]:
    indices, values = np.empty(elements, np.int32), np.empty(elements, np.float32)
    if coding is ValueCoding.NONE:
        header = decode_indices(buffer, elements, indices)
        return header, indices[: header.entries], None
    header = unpack(buffer, elements, indices, values)
    return header, indices[: header.entries], values[: header.entries]


def kept_positions(result: Packed, count: int) -> list[int]:
    start, stop = result.cut_start, result.cut_stop
    if start <= stop:
        return [*range(start), *range(stop, count)]
    return [*range(stop, start)]


@unhurried
@given(supports(), CODINGS, st.integers(0, 9))
def test_unpack_of_pack(support: tuple[np.ndarray, int], coding: ValueCoding, padding: int) -> None:
    indices, elements = support
    capacity = bound(elements, indices.size, coding) + padding
    result, values, buffer = packed(indices, elements, coding, capacity)
    header, found, seen = entries_of(buffer, elements, coding)
    assert found.tolist() == indices.tolist()
    assert (header.entries, header.flags, header.values) == (indices.size, Flag(0), coding)
    assert result.size == result.wanted == header.wanted == HEADER_BYTES + header.payload
    assert (result.entries, result.cut_start, result.cut_stop) == (indices.size, 0, 0)
    assert (buffer[result.size :] == 0xA5).all()
    if values is not None:
        right = np.empty_like(values)
        rounded(values, coding, right)
        assert seen.tobytes() == right.tobytes()


@unhurried
@given(supports(), CODINGS)
def test_the_smallest_index_coding_is_taken(support: tuple[np.ndarray, int], coding: ValueCoding) -> None:
    indices, elements = support
    result, _, buffer = packed(indices, elements, coding, bound(elements, indices.size, coding))
    count = indices.size
    sizes = {IndexCoding.BITMAP: -(-elements // 8), IndexCoding.U32: 4 * count}
    if count == elements:
        sizes[IndexCoding.ALL] = 0
    index_bytes = result.size - HEADER_BYTES - count * coding.bytes
    chosen = read_header(buffer).index
    assert index_bytes <= min(sizes.values())
    assert chosen is IndexCoding.RICE or index_bytes == sizes[chosen]
    # and Rice at least where a fixed parameter, the best of all for most supports, would be smaller
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    mean = int(gaps.sum()) // max(count, 1)
    parameter = max(mean.bit_length() - 1, 0)
    if count and gaps.max() >> parameter < 16:
        assert index_bytes <= 1 + -(-int((1 + parameter + (gaps >> parameter)).sum()) // 8)


def test_every_index_coding_is_taken_somewhere() -> None:
    every = np.arange(64, dtype=np.int32)
    for indices, elements, right in [
        (every, 64, IndexCoding.ALL),
        (every[:0], 0, IndexCoding.ALL),
        (every[:0], 64, IndexCoding.U32),
        (every[5:6] + 1_000_000, 2**20, IndexCoding.U32),
        (np.arange(0, 64, 2, dtype=np.int32), 64, IndexCoding.BITMAP),
        (every * 100, 6400, IndexCoding.RICE),
    ]:
        _, _, buffer = packed(indices, elements, ValueCoding.FP32, bound(elements, indices.size, ValueCoding.FP32))
        assert read_header(buffer).index is right


@unhurried
@given(supports(largest=120), CODINGS, st.integers(0, 2**64), st.data())
def test_a_cut_conserves_every_entry(
    support: tuple[np.ndarray, int], coding: ValueCoding, rotation: int, data: st.DataObject
) -> None:
    indices, elements = support
    whole, _, _ = packed(indices, elements, coding, bound(elements, indices.size, coding))
    capacity = data.draw(st.integers(HEADER_BYTES, whole.wanted))
    result, values, buffer = packed(indices, elements, coding, capacity, rotation)
    header, found, seen = entries_of(buffer, elements, coding)
    assert result.wanted == header.wanted == whole.wanted
    assert result.size == HEADER_BYTES + header.payload <= capacity
    assert (Flag.CUT in header.flags) == (whole.wanted > capacity)
    kept = kept_positions(result, indices.size)
    assert len(kept) == result.entries == header.entries
    assert (result.cut_start == result.cut_stop) == (result.entries == indices.size)
    assert found.tolist() == indices[kept].tolist()
    if values is not None:
        right = np.empty_like(values)
        rounded(values, coding, right)
        assert seen.tolist() == right[kept].tolist()


@pytest.mark.parametrize("coding", list(ValueCoding))
@pytest.mark.parametrize("kind", ["random", "full", "clustered"])
def test_every_capacity_is_used_and_every_place_gets_its_turn(coding: ValueCoding, kind: str) -> None:
    generator = np.random.default_rng(1)
    count = 24
    indices = {
        "random": np.sort(generator.choice(3000, count, replace=False)).astype(np.int32),
        "full": np.arange(count, dtype=np.int32),
        "clustered": np.concatenate([np.arange(count - 5), np.arange(2995, 3000)]).astype(np.int32),
    }[kind]
    elements = count if kind == "full" else 3000
    wanted = packed(indices, elements, coding, bound(elements, count, coding))[0].wanted
    for capacity in range(HEADER_BYTES, wanted):
        sent = [packed(indices, elements, coding, capacity, rotation)[0] for rotation in range(29 + 3 * count)]
        fewest = min(result.entries for result in sent)
        assert fewest >= min((capacity - HEADER_BYTES) // (4 + coding.bytes), count - 1)
        if fewest == 0:
            continue
        turns = -(-3 * count // fewest)
        for first in (0, 29):
            seen = {place for result in sent[first : first + turns] for place in kept_positions(result, count)}
            assert seen == set(range(count))


@unhurried
@given(supports(), WITH_VALUES, st.sampled_from([1.0, 1 / 3, -2.5]))
def test_add_into_is_unpack_and_add(support: tuple[np.ndarray, int], coding: ValueCoding, scale: float) -> None:
    indices, elements = support
    _, _, buffer = packed(indices, elements, coding, bound(elements, indices.size, coding))
    header, found, seen = entries_of(buffer, elements, coding)
    out = some_values(elements)
    right = out.copy()
    right[found] += seen * np.float32(scale)
    assert add_into(buffer, out, scale) == header
    assert out.tobytes() == right.tobytes()


@pytest.mark.parametrize("coding", [ValueCoding.FP32, ValueCoding.FP16, ValueCoding.BF16])
@pytest.mark.parametrize("entries", [1023, 1024, 1025, 2048, 5000])
def test_add_into_across_blocks(entries: int, coding: ValueCoding) -> None:
    elements = 400_000
    places = np.random.default_rng(entries).choice(elements, entries, replace=False)
    indices = np.sort(places).astype(np.int32)
    _, values, buffer = packed(indices, elements, coding, bound(elements, entries, coding))
    assert read_header(buffer).index is IndexCoding.RICE
    right = np.zeros(elements, np.float32)
    arrives = np.empty_like(values)
    rounded(values, coding, arrives)
    right[indices] = arrives * np.float32(0.3)
    out = np.zeros(elements, np.float32)
    add_into(buffer, out, 0.3)
    assert out.tobytes() == right.tobytes()


@pytest.mark.parametrize("index", [IndexCoding.RICE, IndexCoding.U32, IndexCoding.BITMAP, IndexCoding.ALL])
def test_an_unaligned_buffer_is_read_and_written(index: IndexCoding) -> None:
    indices, elements = {
        IndexCoding.RICE: (np.arange(0, 5000, 99, dtype=np.int32), 5000),
        IndexCoding.U32: (np.array([1_000_000], np.int32), 2**20),
        IndexCoding.BITMAP: (np.arange(0, 100, 2, dtype=np.int32), 100),
        IndexCoding.ALL: (np.arange(100, dtype=np.int32), 100),
    }[index]
    values = some_values(indices.size)
    size = bound(elements, indices.size, ValueCoding.FP32)
    buffer = np.zeros(size + 3, np.uint8)[3:]
    pack(indices, values, elements, buffer, ValueCoding.FP32)
    assert read_header(buffer).index is index
    out = np.zeros(elements, np.float32)
    add_into(buffer, out, 1.0)
    assert out[indices].tolist() == values.tolist()
    assert np.count_nonzero(out) == indices.size


@pytest.mark.parametrize("coding", list(ValueCoding))
def test_not_finite_sends_only_the_flag(coding: ValueCoding) -> None:
    indices = np.arange(3, dtype=np.int32)
    values = None if coding is ValueCoding.NONE else np.array([1, np.nan, 2], np.float32)
    buffer = np.full(HEADER_BYTES, 0xA5, np.uint8)
    result = pack(indices, values, 10, buffer, coding, finite=False)
    assert result == Packed(HEADER_BYTES, 0, 0, 0, 3)
    header, found, _ = entries_of(buffer, 10, coding)
    assert header == Header(IndexCoding.U32, coding, Flag.NONFINITE, 0, 0, 0)
    assert found.size == 0


@unhurried
@given(st.integers(0, 400), st.integers(0, 400), CODINGS, st.randoms(use_true_random=False))
def test_bound_holds_for_fewer_entries_too(elements: int, most: int, coding: ValueCoding, random) -> None:
    capacity = bound(elements, most, coding)
    count = random.randint(0, min(most, elements))
    indices = np.array(sorted(random.sample(range(elements), count)), np.int32)
    result, _, _ = packed(indices, elements, coding, capacity)
    assert result.entries == count


def worst_supports() -> list[tuple[np.ndarray, int]]:
    """Supports that make codes long: quotients at the escape, alternating small and large gaps, the far end."""
    cases = []
    for elements in (1000, 50_000, 2**31 - 1):
        for count in (1, 2, 3, 10, 99):
            mean = elements // count
            far = np.arange(elements - count, elements)
            even = np.arange(1, count + 1) * mean - 1
            cases += [(far, elements), (even, elements)]
            parameter = max(mean.bit_length() - 1, 0)
            for shift in range(max(parameter - 2, 0), parameter + 1):
                jump = 16 << shift
                escapes = min(count, elements // (jump + count))
                steps = np.array([jump + 1] * escapes + [1] * (count - escapes))
                cases.append((np.cumsum(steps) - 1, elements))
                cases.append((np.cumsum(steps[::-1]) - 1, elements))
    return [(places.astype(np.int32), elements) for places, elements in cases if places[-1] < elements]


def test_bound_holds_for_the_worst_supports() -> None:
    cases = worst_supports()
    assert len(cases) > 100
    for indices, elements in cases:
        capacity = bound(elements, indices.size, ValueCoding.NONE)
        assert packed(indices, elements, ValueCoding.NONE, capacity)[0].entries == indices.size


@pytest.mark.parametrize(("density", "most_bits"), [(0.01, 8.2), (0.001, 11.6)])
def test_bits_an_index(density: float, most_bits: float) -> None:
    elements = 25_000_000
    count = int(elements * density)
    gaps = np.random.default_rng(0).geometric(density, count)
    indices = (np.cumsum(gaps) - 1).astype(np.int32)
    indices = indices[indices < elements]
    result, _, buffer = packed(indices, elements, ValueCoding.NONE, bound(elements, count, ValueCoding.NONE))
    assert read_header(buffer).index is IndexCoding.RICE
    assert 8 * (result.size - HEADER_BYTES) / indices.size <= most_bits
    assert result.size == pytest.approx(expected(elements, indices.size, ValueCoding.NONE), rel=0.01)


@pytest.mark.parametrize(("elements", "entries"), [(0, 0), (1, 0), (1, 1), (8, 8), (100, 30), (100, 60), (10**6, 10)])
def test_expected_is_near_the_mean(elements: int, entries: int) -> None:
    generator = np.random.default_rng(2)
    sizes = []
    for _ in range(50):
        indices = np.sort(generator.choice(elements, entries, replace=False)).astype(np.int32)
        sizes.append(packed(indices, elements, ValueCoding.FP16, bound(elements, entries, ValueCoding.FP16))[0].size)
    assert np.mean(sizes) == pytest.approx(expected(elements, entries, ValueCoding.FP16), abs=2, rel=0.01)
    assert max(sizes) <= bound(elements, entries, ValueCoding.FP16)


def call(**changed: object) -> Callable[[], Packed]:
    arguments: dict[str, object] = {
        "indices": np.array([1, 5], np.int32),
        "values": np.ones(2, np.float32),
        "elements": 10,
        "buffer": np.zeros(64, np.uint8),
        "coding": ValueCoding.FP32,
    }
    return lambda: pack(**{**arguments, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"indices": np.array([5, 1], np.int32)}, "indices: must ascend"),
        ({"indices": np.array([1, 10], np.int32)}, "indices: must ascend"),
        ({"indices": np.array([1, 5], np.int64)}, "indices: int64"),
        ({"indices": np.arange(8, dtype=np.int32)[::4]}, "indices: .*not contiguous"),
        ({"values": np.ones(3, np.float32)}, "values: 3 for 2 indices"),
        ({"values": np.ones(2)}, "values: float64"),
        ({"values": None}, "values: missing"),
        ({"coding": ValueCoding.NONE}, "values: given"),
        ({"elements": 2**31}, "elements: 2147483648"),
        ({"buffer": np.zeros(15, np.uint8)}, "buffer: 15 bytes"),
        ({"buffer": np.zeros(64, np.int8)}, "buffer: int8"),
    ],
)
def test_pack_refuses(changed: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(**changed)()


def test_messages_are_refused_where_they_do_not_belong() -> None:
    indices, values = np.zeros(10, np.int32), np.zeros(10, np.float32)
    with_values, without, opaque = (np.zeros(64, np.uint8) for _ in range(3))
    pack(np.array([1, 5], np.int32), np.ones(2, np.float32), 10, with_values, ValueCoding.FP32)
    pack(np.array([1, 5], np.int32), None, 10, without, ValueCoding.NONE)
    write_header(opaque, Header(IndexCoding.OPAQUE, ValueCoding.FP32, Flag(0), 0, 16, 0))
    for wrong in (lambda: unpack(without, 10, indices, values), lambda: add_into(without, values, 1.0)):
        with pytest.raises(MessageCoding, match="value coding: found 0 NONE"):
            wrong()
    with pytest.raises(MessageCoding, match="value coding: found 1 FP32"):
        decode_indices(with_values, 10, indices)
    with pytest.raises(MessageCoding, match="index coding: found 0 OPAQUE"):
        unpack(opaque, 10, indices, values)
    with pytest.raises(MessageCount, match="room for 1 indices"):
        unpack(with_values, 10, indices[:1], values)
    with pytest.raises(MessageCount, match="room for 1 values"):
        unpack(with_values, 10, indices, values[:1])
