"""The compiled codings equal the reference bit for bit."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.kernels.cpu import coding as cpu
from thinwire.kernels.reference import coding as reference

unhurried = settings(deadline=None)  # the first call of a kernel compiles it
CODINGS = [reference.FP32, reference.FP16, reference.BF16]


@st.composite
def supports(draw: st.DrawFn) -> tuple[list[int], int]:
    """Ascending indices, and the number of elements: dense, sparse, clustered, and up to the largest size there is."""
    elements = draw(st.sampled_from([1, 2, 16, 17, 100, 1000, 2**20, 2**31 - 1]))
    places = draw(st.sets(st.integers(0, elements - 1), min_size=1, max_size=60))
    if draw(st.booleans()):
        first = draw(st.integers(0, elements - 1))
        places |= set(range(first, min(first + 40, elements)))
    return sorted(places), elements


def whole(indices: np.ndarray) -> cpu.Kept:
    return ((0, indices.size), (0, 0))


@unhurried
@given(supports(), st.integers(0, 31))
def test_rice_equals_reference(support: tuple[list[int], int], parameter: int) -> None:
    places, elements = support
    width = (elements - 1).bit_length()
    indices = np.array(places, np.int32)
    right = reference.write_rice(places, parameter, width)
    best = cpu.rice_parameter(indices, whole(indices), parameter, width)
    assert best == reference.rice_parameter(places, parameter, width)
    assert len(right) == -(-reference.rice_bits(places, parameter, width) // 8)
    buffer = np.full(len(right) + 5, 0xA5, np.uint8)
    cpu.write_rice(indices, whole(indices), parameter, width, buffer, 3, 3 + len(right))
    assert buffer[3:-2].tobytes() == right
    assert set(buffer[:3]) | set(buffer[-2:]) == {0xA5}
    assert reference.read_rice(right, len(places), parameter, width) == places
    found = np.empty_like(indices)
    outcome = cpu.read_rice(buffer, 3, 3 + len(right), parameter, width, elements, indices.size, found)
    assert outcome[0] == cpu.GOOD
    assert found.tolist() == places


@unhurried
@given(supports(), st.data())
def test_two_ranges_of_entries_write_what_their_list_would(
    support: tuple[list[int], int], data: st.DataObject
) -> None:
    places, elements = support
    width = (elements - 1).bit_length()
    start = data.draw(st.integers(0, len(places)))
    stop = data.draw(st.integers(start, len(places)))
    rest = places[:start] + places[stop:]
    kept = ((0, start), (stop, len(places)))
    indices = np.array(places, np.int32)
    right = reference.write_rice(rest, 3, width)
    buffer = np.zeros(len(right), np.uint8)
    cpu.write_rice(indices, kept, 3, width, buffer, 0, len(right))
    assert buffer.tobytes() == right
    buffer = np.zeros(4 * len(rest), np.uint8)
    cpu.write_u32(indices, kept, buffer, 0)
    assert buffer.tobytes() == reference.write_u32(rest)
    if elements <= 1000:
        right = reference.write_bitmap(rest, elements)
        buffer = np.full(len(right), 0xA5, np.uint8)
        cpu.write_bitmap(indices, kept, buffer, 0, len(right))
        assert buffer.tobytes() == right


@unhurried
@given(supports(), st.integers(0, 31))
def test_rice_parameter_equals_reference(support: tuple[list[int], int], parameter: int) -> None:
    places, elements = support
    width = (elements - 1).bit_length()
    indices = np.array(places, np.int32)
    assert cpu.rice_parameter(indices, whole(indices), parameter, width) == reference.rice_parameter(
        places, parameter, width
    )


@unhurried
@given(supports(), st.data())
def test_rice_room_equals_reference(support: tuple[list[int], int], data: st.DataObject) -> None:
    places, elements = support
    width = (elements - 1).bit_length()
    start = data.draw(st.integers(0, len(places) - 1))
    value_bits = data.draw(st.sampled_from([0, 16, 32]))
    parameter = data.draw(st.integers(0, 31))
    # around what some number of entries takes exactly: elsewhere a bit more or less makes no difference
    kept = data.draw(st.integers(0, len(places)))
    ring = [*places[start:], *places[:start]]
    chosen = sorted(ring[len(places) - kept :])
    room = reference.rice_bits(chosen, parameter, width) + kept * value_bits + data.draw(st.integers(-1, 1))
    arguments = (start, room, value_bits, parameter, width)
    assert cpu.rice_room(np.array(places, np.int32), *arguments) == reference.rice_room(places, *arguments)


FLOATS = st.floats(width=32, allow_nan=False)
EDGES = [0.0, -0.0, 65504.0, 65519.99, 65520.0, -65520.0, 1e30, 2**-24, 2**-25, 1.5 * 2**-25, 6.1035156e-05, 3.4e38]


@unhurried
@given(st.lists(FLOATS | st.floats(-70000, 70000, width=32) | st.sampled_from(EDGES), max_size=40))
def test_values_equal_reference(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    for coding in CODINGS:
        right = reference.write_values(torch.from_numpy(values), coding)
        buffer = np.full(len(right) + 2, 0xA5, np.uint8)
        cpu.write_values(values, ((0, values.size), (0, 0)), coding, buffer, 1)
        assert buffer.tobytes() == b"\xa5" + right + b"\xa5"
        seen = np.empty_like(values)
        cpu.read_values(buffer, 1, values.size, coding, seen)
        assert seen.tobytes() == reference.read_values(right, coding).numpy().tobytes()
        again = np.empty_like(values)
        cpu.rounded(values, coding, again)
        assert (
            again.tobytes() == seen.tobytes() == reference.rounded(torch.from_numpy(values), coding).numpy().tobytes()
        )


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)), st.randoms())
@unhurried
def test_what_is_taken_in_16_bits_and_what_stays_are_the_element(numbers: list[float], dice: random.Random) -> None:
    elements = np.array(numbers, np.float32)
    indices = np.array(sorted(dice.sample(range(len(numbers)), len(numbers) // 2)), np.int32)
    for coding, kind in ((reference.FP16, torch.float16), (reference.BF16, torch.bfloat16)):
        limit = 0.3 * torch.finfo(kind).max
        residual, expected = elements.copy(), torch.from_numpy(elements.copy())
        words, values = np.empty(indices.size, np.uint16), np.empty(indices.size, np.float32)
        cpu.take_rounded(residual, indices, coding, limit, words, values)
        right, stand_for = reference.take_rounded(expected, torch.from_numpy(indices), coding, limit)
        assert words.tobytes() == right.view(torch.int16).numpy().tobytes()
        assert np.array_equal(values, stand_for.numpy())
        assert np.array_equal(residual, expected.numpy())
        before = elements[indices].astype(np.float64)
        assert np.allclose(values.astype(np.float64) + residual[indices], before, rtol=2**-24, atol=2**-149)


def test_every_half_is_read_as_torch_reads_it() -> None:
    halves = np.arange(2**16, dtype=np.uint16)
    seen = np.empty(2**16, np.float32)
    for coding, kind in ((reference.FP16, torch.float16), (reference.BF16, torch.bfloat16)):
        cpu.read_values(halves.astype("<u2").view(np.uint8), 0, 2**16, coding, seen)
        right = torch.from_numpy(halves.view(np.int16)).view(kind).float().numpy()
        numbers = ~np.isnan(right)
        assert (np.isnan(seen) == ~numbers).all()
        assert seen[numbers].tobytes() == right[numbers].tobytes()


def test_a_nan_stays_a_nan() -> None:
    values = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    for coding in CODINGS:
        seen = np.zeros_like(values)
        cpu.rounded(values, coding, seen)
        assert np.isnan(seen).all()


def test_ascending() -> None:
    for places, elements, right in [
        ([], 0, True),
        ([0], 1, True),
        ([0], 0, False),
        ([-1, 0], 5, False),
        ([0, 3, 4], 5, True),
        ([0, 3, 5], 5, False),
        ([0, 3, 3], 5, False),
        ([0, 4, 3], 5, False),
    ]:
        assert cpu.ascending(np.array(places, np.int32), elements) == right
