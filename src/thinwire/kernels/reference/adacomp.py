"""AdaComp in plain torch and Python, bin by bin: the oracle of `cpu.adacomp`, which describes words, blocks and tiles.

Tensors are flat float32; words are lists of integers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.reference.basic import add_finite

STREAM_ENDS, INDEX_TOO_LARGE, RUN_TOO_LONG, WORDS_LEFT, BINS_WRONG, SCALES_WRONG = -1, -2, -3, -4, -5, -6


class Encoded(NamedTuple):
    """What `encode_segment` found; offsets, maxima and scales have an element for each tile."""

    finite: bool
    words: list[int]
    offsets: list[int]
    maxima: list[float]
    scales: list[float]


class _Format:
    """The fields of a word, for bins of this length."""

    def __init__(self, bin_length: int) -> None:
        bits = 8 if bin_length <= 63 else 16
        self.empty = 2 ** (bits - 2) - 1
        self.minus = 2 ** (bits - 2)
        self.last = 2 ** (bits - 1)
        self.longest = 2**bits - 1


def block_bins(bin_length: int) -> int:
    """Bins in a block."""
    return max(1, 4096 // bin_length)


def tile_bins(bin_length: int) -> int:
    """Bins in a tile: a whole number of blocks."""
    block = block_bins(bin_length)
    return block if bin_length <= 63 else max(1, 16384 // bin_length // block) * block


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _run_words(run: int, form: _Format) -> list[int]:
    """Words of a run of empty bins."""
    words = []
    while run > 0:
        part = min(run, form.longest)
        words += [form.empty | form.last] if part == 1 else [form.empty, part]
        run -= part
    return words


def _accumulate(gradient: Tensor, residual: Tensor, bin_length: int) -> bool:
    """`residual += gradient` by blocks of finite sums; True when all are."""
    whole = gradient.numel() // bin_length * bin_length
    size = block_bins(bin_length) * bin_length
    blocks = [slice(start, min(start + size, whole)) for start in range(0, whole, size)]
    return add_finite(residual, gradient, [*blocks, slice(whole, None)])


def encode_segment(gradient: Tensor, residual: Tensor, bin_length: int, factor: float) -> Encoded:
    """`residual += gradient`, and the words of what is to be sent."""
    if not _accumulate(gradient, residual, bin_length):
        return Encoded(False, [], [], [], [])
    form = _Format(bin_length)
    extra = torch.tensor(factor, dtype=torch.float32) - 1.0
    encoded = Encoded(True, [], [], [], [])
    tile = tile_bins(bin_length) * bin_length
    for tile_start in range(0, gradient.numel(), tile):
        encoded.offsets.append(len(encoded.words))
        tile_stop = min(tile_start + tile, gradient.numel())
        maxima, magnitudes, sent, run = 0.0, 0.0, 0, 0
        for start in range(tile_start, tile_stop, bin_length):
            place = slice(start, min(start + bin_length, tile_stop))
            total = residual[place]
            top = total.abs().max()
            maxima += float(top)
            selected = ((total + gradient[place] * extra).abs() >= top) & (total != 0)
            indices = selected.nonzero().flatten().tolist()
            if not indices:
                run += 1
                continue
            encoded.words.extend(_run_words(run, form))
            run = 0
            for index in indices:
                encoded.words.append(index | (form.minus if total[index] < 0 else 0))
                magnitudes += abs(float(total[index]))
            encoded.words[-1] |= form.last
            sent += len(indices)
        encoded.words.extend(_run_words(run, form))
        encoded.maxima.append(maxima)
        encoded.scales.append(_float32(magnitudes / sent) if sent else 0.0)
    return encoded


def layer_scale(maxima: Sequence[float], bins: int) -> float:
    """The paper's scale of a segment: the mean over all bins of max |G|."""
    total = 0.0
    for value in maxima:
        total += value
    return _float32(total / bins) if bins else 0.0


def decode_segment(
    words: Sequence[int],
    bin_length: int,
    scales: Sequence[float],
    out: Tensor,
    multiplier: float,
    first_bin: int,
    bins: int,
) -> int:
    """`out[e] += sign * (scale * multiplier)` for `bins` bins from first_bin on, cyclically; 0 or an error."""
    form = _Format(bin_length)
    tile = tile_bins(bin_length)
    total = -(-out.numel() // bin_length)
    if not 0 <= bins <= total or not 0 <= first_bin <= max(total - 1, 0):
        return BINS_WRONG
    if len(scales) != 1 and len(scales) < -(-total // tile):
        return SCALES_WRONG
    factor = torch.tensor(multiplier, dtype=torch.float32)
    position, done = 0, 0
    while done < bins:
        now = (first_bin + done) % total
        if position == len(words):
            return STREAM_ENDS
        word = words[position]
        position += 1
        index = word & form.empty
        if index == form.empty:
            run = 1
            if not word & form.last:
                if position == len(words):
                    return STREAM_ENDS
                run = words[position]
                position += 1
            if run < 1 or run > min(bins - done, total - now, tile - now % tile):
                return RUN_TOO_LONG
            done += run
            continue
        element = now * bin_length + index
        if index >= bin_length or element >= out.numel():
            return INDEX_TOO_LARGE
        value = torch.tensor(scales[now // tile if len(scales) > 1 else 0], dtype=torch.float32) * factor
        out[element] += -value if word & form.minus else value
        done += bool(word & form.last)
    return WORDS_LEFT if position < len(words) else 0
