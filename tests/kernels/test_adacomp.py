"""AdaComp's kernels equal the reference bit for bit, conserve, decode what they encode, and survive hostile words."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.profiles import tries
from thinwire.kernels.cpu import adacomp
from thinwire.kernels.reference import adacomp as reference

LENGTHS = st.sampled_from([1, 2, 7, 8, 9, 50, 63, 64, 65, 127, 128, 500, 1000, 4096, 5000, 16383])
LARGEST = float(np.finfo(np.float32).max)
unhurried = settings(max_examples=tries(60))  # the first call of a kernel compiles it


class Sent:
    """One encoded segment and its outputs."""

    def __init__(self, gradient: np.ndarray, residual: np.ndarray, length: int, factor: float = 2.0) -> None:
        self.length = length
        self.bins = -(-gradient.size // length)
        tiles = -(-self.bins // adacomp.tile_bins(length))
        words = np.full(gradient.size, 77, np.uint8 if length <= 63 else np.uint16)
        self.offsets = np.full(tiles, 99, np.uint32)
        self.maxima = np.full(tiles, np.nan)
        self.tile_scales = np.full(tiles, np.nan, np.float32)
        self.finite, written = adacomp.encode_segment(
            gradient, residual, length, factor, words, self.offsets, self.maxima, self.tile_scales
        )
        self.words = words[:written]

    def scales(self, kind: str) -> np.ndarray:
        if kind == "tile" and self.tile_scales.size:
            return self.tile_scales
        return np.array([adacomp.layer_scale(self.maxima, self.bins)], np.float32)


def draw_size(data: st.DataObject, length: int) -> int:
    tile = adacomp.tile_bins(length) * length
    sizes = [0, 1, length - 1, length, length + 1, 10 * length + 3, tile - 1, tile, tile + length + 1, 2 * tile + 1]
    most = 6_000 if length < 8 else 40_000  # the reference takes its time for every bin
    return data.draw(st.sampled_from([min(size, most) for size in sizes]))


def draw_vector(data: st.DataObject, size: int, length: int) -> np.ndarray:
    """Gaussian of some scale, or few different values; some ranges of bins zero."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scale = data.draw(st.sampled_from([1e-42, 1e-6, 1.0, 1e30]))
    kind = data.draw(st.sampled_from(["gauss", "ternary", "constant"]))
    if kind == "gauss":
        x = random.standard_normal(size)
    elif kind == "ternary":
        x = random.integers(-1, 2, size).astype(np.float64)
    else:
        x = np.full(size, data.draw(st.sampled_from([-1.0, 1.0])))
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, size))
        x[start : start + data.draw(st.sampled_from([1, length, 2 * length, 300 * length]))] = 0.0
    return (x * scale).astype(np.float32)


def draw_segment(data: st.DataObject) -> tuple[np.ndarray, np.ndarray, int]:
    length = data.draw(LENGTHS)
    size = draw_size(data, length)
    gradient = draw_vector(data, size, length)
    residual = draw_vector(data, size, length) if data.draw(st.booleans()) else np.zeros(size, np.float32)
    return gradient, residual, length


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()


def spread(words: np.ndarray, length: int, scales: np.ndarray, size: int, first: int, bins: int) -> np.ndarray:
    out = np.zeros(size, np.float32)
    assert adacomp.decode_segment(words, length, scales, out, 1.0, first, bins) == 0
    return out


@pytest.mark.parametrize("length", [1, 50, 63, 64, 100, 500, 3000, 5000, 16383])
def test_tiles_equal_reference(length: int) -> None:
    assert adacomp.block_bins(length) == reference.block_bins(length)
    assert adacomp.tile_bins(length) == reference.tile_bins(length)
    assert adacomp.tile_bins(length) % adacomp.block_bins(length) == 0


@unhurried
@given(st.data())
def test_encode_equals_reference(data: st.DataObject) -> None:
    gradient, residual, length = draw_segment(data)
    factor = data.draw(st.sampled_from([2.0, 1.5, 1.0, 3.0]))
    for place in data.draw(st.lists(st.integers(0, max(gradient.size - 1, 0)), max_size=data.draw(st.integers(0, 2)))):
        if gradient.size:
            gradient[place] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, LARGEST, -LARGEST]))
    expected_residual = torch.from_numpy(residual.copy())
    expected = reference.encode_segment(torch.from_numpy(gradient), expected_residual, length, factor)
    sent = Sent(gradient, residual, length, factor)
    assert same_bits(residual, expected_residual.numpy())
    assert sent.finite == expected.finite
    assert sent.words.tolist() == expected.words
    if sent.finite:
        assert sent.offsets.tolist() == expected.offsets
        assert sent.maxima.tolist() == expected.maxima
        assert sent.tile_scales.tolist() == expected.scales
        assert adacomp.layer_scale(sent.maxima, sent.bins) == reference.layer_scale(expected.maxima, sent.bins)


@unhurried
@given(st.data(), st.sampled_from(["layer", "tile"]))
def test_what_is_sent_and_what_stays_is_all(data: st.DataObject, kind: str) -> None:
    gradient, residual, length = draw_segment(data)
    total = residual + gradient
    sent = Sent(gradient, residual, length)
    assert same_bits(residual, total)
    scales = sent.scales(kind)
    out = spread(sent.words, length, scales, total.size, 0, sent.bins)
    assert adacomp.decode_segment(sent.words, length, scales, residual, -1.0, 0, sent.bins) == 0
    assert same_bits(residual, total - out)
    assert (out[total == 0] == 0).all()
    assert np.array_equal(np.sign(out[out != 0]), np.sign(total[out != 0]))


@unhurried
@given(st.data(), st.sampled_from(["layer", "tile"]))
def test_decode_equals_reference(data: st.DataObject, kind: str) -> None:
    gradient, residual, length = draw_segment(data)
    sent = Sent(gradient, residual, length)
    scales = sent.scales(kind)
    out = draw_vector(data, gradient.size, length)
    expected = torch.from_numpy(out.copy())
    multiplier = data.draw(st.sampled_from([1.0, -1.0, 1 / 3]))
    assert adacomp.decode_segment(sent.words, length, scales, out, multiplier, 0, sent.bins) == 0
    words = sent.words.tolist()
    assert reference.decode_segment(words, length, scales.tolist(), expected, multiplier, 0, sent.bins) == 0
    assert same_bits(out, expected.numpy())


@unhurried
@given(st.data(), st.integers(-20, 20))
def test_powers_of_two_pass_through(data: st.DataObject, exponent: int) -> None:
    length = data.draw(LENGTHS)
    size = draw_size(data, length)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    gradient, residual = random.standard_normal((2, size)).astype(np.float32)
    by = np.float32(2.0**exponent)
    plain, scaled = Sent(gradient, residual.copy(), length), Sent(by * gradient, by * residual, length)
    assert same_bits(plain.words, scaled.words)
    assert same_bits(plain.tile_scales * by, scaled.tile_scales)
    assert same_bits(plain.scales("layer") * by, scaled.scales("layer"))


def bins_of_words(words: list[int], bin_length: int) -> list[list[int]]:
    """The words of each bin of well-formed words, without LAST; an empty list for an empty bin."""
    empty, last = ((1 << 6) - 1, 1 << 7) if bin_length <= 63 else ((1 << 14) - 1, 1 << 15)
    bins: list[list[int]] = [[]]
    source = iter(words)
    for word in source:
        if word & empty == empty:
            bins += [[] for _ in range(1 if word & last else next(source))]
        else:
            bins[-1].append(word & ~last)
            if word & last:
                bins.append([])
    return bins[:-1]


@unhurried
@given(st.data(), st.sampled_from(["layer", "tile"]))
def test_a_cut_sends_its_bins_only(data: st.DataObject, kind: str) -> None:
    gradient, residual, length = draw_segment(data)
    sent = Sent(gradient, residual, length)
    scales = sent.scales(kind)
    total = residual.copy()
    first = data.draw(st.integers(0, max(sent.bins - 1, 0)))
    capacity = data.draw(st.integers(0, sent.words.size + 3))
    cut = np.full(sent.words.size + 3, 55, sent.words.dtype)
    bins, written = adacomp.cut_segment(sent.words, sent.offsets, sent.bins, length, first, capacity, cut)
    assert written <= capacity
    assert bins > 0 or sent.bins == 0 or capacity == 0
    assert bins == sent.bins or written >= capacity - 1
    out = spread(cut[:written], length, scales, total.size, first, bins)
    assert adacomp.decode_segment(cut[:written], length, scales, residual, -1.0, first, bins) == 0
    assert same_bits(residual, total - out)

    chosen = bins_of_words(sent.words.tolist(), length)
    chosen = (chosen[first:] + chosen[:first])[:bins]
    arrived = bins_of_words(cut[:written].tolist(), length)
    assert arrived[:-1] == chosen[:-1]
    assert arrived == [] or arrived[-1] == chosen[-1][: len(arrived[-1])]


@unhurried
@given(st.data(), st.sampled_from(["layer", "tile"]), st.booleans())
def test_ranks_are_added_in_order(data: st.DataObject, kind: str, with_cuts: bool) -> None:
    length = data.draw(LENGTHS)
    size = draw_size(data, length)
    expected = np.zeros(size, np.float32)
    messages, scales, firsts, counts = [], [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        sent = Sent(draw_vector(data, size, length), np.zeros(size, np.float32), length)
        scales.append(sent.scales(kind))
        first, bins, words = 0, sent.bins, sent.words
        if with_cuts:
            first = data.draw(st.integers(0, max(sent.bins - 1, 0)))
            cut, room = np.empty_like(words), data.draw(st.integers(0, words.size))
            bins, written = adacomp.cut_segment(words, sent.offsets, sent.bins, length, first, room, cut)
            words = cut[:written]
        messages.append(words)
        firsts.append(first)
        counts.append(bins)
        assert adacomp.decode_segment(words, length, scales[-1], expected, 0.25, first, bins) == 0
    stops = np.cumsum([words.size for words in messages])
    starts = stops - [words.size for words in messages]
    out = np.full(size, np.nan, np.float32)
    places = (np.array(firsts, np.int64), np.array(counts, np.int64))
    everything = np.concatenate(messages)
    assert adacomp.decode_all(everything, starts, stops, length, np.stack(scales), out, 0.25, *places) == (0, 0)
    assert same_bits(out, expected)
    if everything.size:
        code, rank = adacomp.decode_all(everything, starts, stops - 1, length, np.stack(scales), out, 0.25, *places)
        assert code < 0
        assert 0 <= rank < len(messages)


@unhurried
@given(st.data())
def test_pieces_of_whole_tiles_give_the_same_bits(data: st.DataObject) -> None:
    gradient, residual, length = draw_segment(data)
    tile = adacomp.tile_bins(length)
    place = data.draw(st.integers(0, 2)) * tile * length
    pieces = [Sent(gradient[part], residual[part].copy(), length) for part in (slice(place), slice(place, None))]
    whole = Sent(gradient, residual, length)
    assert same_bits(whole.words, np.concatenate([piece.words for piece in pieces]))
    assert same_bits(whole.maxima, np.concatenate([piece.maxima for piece in pieces]))
    assert same_bits(whole.tile_scales, np.concatenate([piece.tile_scales for piece in pieces]))


@settings(max_examples=tries(300))
@given(st.data())
def test_hostile_words_are_refused_like_the_reference_does(data: st.DataObject) -> None:
    length = data.draw(LENGTHS)
    size = data.draw(st.sampled_from([0, 1, length - 1, length, 2 * length + 1, 7 * length]))
    total = -(-size // length)
    most = 255 if length <= 63 else 65535
    likely = [0, 1, 2, 63, 127, 128, 191, 255] if length <= 63 else [0, 1, 2, 16383, 32767, 32768, 49151, 65535]
    words = data.draw(st.lists(st.sampled_from(likely) | st.integers(0, most), max_size=12))
    first = data.draw(st.integers(-1, total + 1))
    bins = data.draw(st.integers(-1, total + 1))
    scales = np.ones(data.draw(st.integers(0, 2)), np.float32)
    guarded = np.zeros(size + 2000, np.float32)
    expected = torch.zeros(size)
    array = np.array(words, np.uint8 if length <= 63 else np.uint16)
    code = adacomp.decode_segment(array, length, scales, guarded[1000 : 1000 + size], 1.0, first, bins)
    assert code == reference.decode_segment(words, length, scales.tolist(), expected, 1.0, first, bins)
    assert not guarded[:1000].any()
    assert not guarded[1000 + size :].any()
    if code == 0:
        assert same_bits(guarded[1000 : 1000 + size], expected.numpy())


@pytest.mark.parametrize(("length", "longest"), [(50, 255), (500, 65535)])
def test_runs_of_empty_bins_are_short(length: int, longest: int) -> None:
    tile = adacomp.tile_bins(length)
    gradient = np.zeros(3 * tile * length, np.float32)
    sent = Sent(gradient, gradient.copy(), length)
    empty = 2 ** (sent.words.itemsize * 8 - 2) - 1
    assert sent.words.tolist() == [empty, tile] * 3
    assert sent.scales("layer") == 0
    assert tile <= longest


def test_runs_longer_than_a_word_start_again() -> None:
    gradient = np.zeros(4096 + 1, np.float32)
    gradient[[300, 4096]] = -1.0
    sent = Sent(gradient, np.zeros_like(gradient), 1)
    last, minus = 128, 64
    runs = [63, 255] * 14 + [63, 3795 - 14 * 255]
    assert sent.words.tolist() == [63, 255, 63, 45, last | minus, *runs, last | minus]
    assert same_bits(spread(sent.words, 1, sent.scales("tile"), gradient.size, 0, sent.bins), gradient)


def test_constant_segment_is_exact() -> None:
    for length in (50, 500):
        gradient = np.full(20_003, -0.3, np.float32)
        residual = np.zeros_like(gradient)
        sent = Sent(gradient, residual, length)
        assert sent.words.size == gradient.size
        for kind in ("layer", "tile"):
            assert same_bits(spread(sent.words, length, sent.scales(kind), gradient.size, 0, sent.bins), gradient)


def test_wrong_buffers_are_refused() -> None:
    x = np.zeros(100, np.float32)
    tiles = (np.zeros(1, np.uint32), np.zeros(1), np.zeros(1, np.float32))
    for length, words in (
        (50, np.zeros(100, np.uint16)),
        (500, np.zeros(100, np.uint8)),
        (0, np.zeros(100, np.uint8)),
    ):
        with pytest.raises(ValueError, match="words of uint"):
            adacomp.encode_segment(x, x.copy(), length, 2.0, words, *tiles)
    with pytest.raises(ValueError, match="as long as"):
        adacomp.encode_segment(x, x.copy(), 50, 2.0, np.zeros(99, np.uint8), *tiles)
    with pytest.raises(ValueError, match="every tile"):
        adacomp.encode_segment(x, x.copy(), 50, 2.0, np.zeros(100, np.uint8), tiles[0][:0], *tiles[1:])


@pytest.mark.parametrize(("length", "low", "high"), [(50, 41 * 0.95, 41 * 1.05), (500, 160.0, 190.0)])
def test_rate_on_gaussian_gradients(length: int, low: float, high: float) -> None:
    """32 bits an element against the bits of the words, over steps 101 to 150, with the paper's scale."""
    random = np.random.default_rng(0)
    residual = np.zeros(50_000, np.float32)
    bits = 0
    for step in range(150):
        sent = Sent(random.standard_normal(residual.size, dtype=np.float32), residual, length)
        scales = sent.scales("layer")
        assert adacomp.decode_segment(sent.words, length, scales, residual, -1.0, 0, sent.bins) == 0
        bits += sent.words.nbytes * 8 if step >= 100 else 0
    assert low <= 50 * 32 * residual.size / bits <= high
