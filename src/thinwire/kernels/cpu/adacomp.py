"""AdaComp, compiled: accumulate, select and write words in one pass; decode, cut, and take out of the residual.

A *segment* is one parameter: a flat, contiguous float32 array in bins of `bin_length`; the last bin may be short.
In every bin the elements with `|G + (factor - 1) * gradient| >= max |G|` are sent as a sign and an index in the bin,
where G = residual + gradient (Chen et al. 2018).  Elements with G = 0 have no sign and are never sent, so an all-zero
bin sends nothing.  The value of a sign is the *scale*: one for the whole segment, or one for each tile.

Words: uint8 for bins of up to 63 elements, uint16 up to 16383.  From the low end: 6 or 14 bits of index, a bit MINUS,
and a bit LAST on the last word of a bin.  An empty bin is the index of all ones with LAST; two or more empty bins are
the index of all ones without LAST, then one raw word with their number (at most 255 or 65535; then it starts again).

Two larger units, both of whole bins.  A *block*, near 4096 elements, is tested for finite sums before it is added, and
stays in the first-level cache while it is worked on; a short last bin is a separate block.  A *tile*, near 4096
elements for words of 8 bits and 16384 for words of 16, has its own scale and word offset; a run of empty bins ends
with its tile, so that tiles decode alone, and a segment can be encoded in pieces of whole tiles, by any number of
threads, with the same bits.

Selection does not depend on the scale, and nothing leaves the residual before `decode_segment` is called on it with
-1 and the words that were sent: a message can be cut, or not be sent at all, with nothing to put back.
Equal to `reference.adacomp` bit for bit.
"""

import numpy as np
from numpy.typing import NDArray

from thinwire.kernels.cpu._jit import Floats, Indices, kernel
from thinwire.kernels.cpu._masks import ONE, lowest_bit
from thinwire.kernels.cpu._tiles import LANES, add_and_test

Words = NDArray[np.uint8] | NDArray[np.uint16]

STREAM_ENDS, INDEX_TOO_LARGE, RUN_TOO_LONG, WORDS_LEFT, BINS_WRONG, SCALES_WRONG = -1, -2, -3, -4, -5, -6

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_BATCH = 256


@kernel
def block_bins(bin_length: int) -> int:
    """Bins in a block."""
    return max(1, 4096 // bin_length)


@kernel
def tile_bins(bin_length: int) -> int:
    """Bins in a tile: a whole number of blocks."""
    block = block_bins(bin_length)
    return block if bin_length <= 63 else max(1, 16384 // bin_length // block) * block


@kernel
def _largest(residual: Floats, gradient: Floats, tops: Indices) -> np.int32:
    """Bits of the largest |residual + gradient| of each bin, (bins, length), and of all; NaN is largest."""
    largest = np.int32(0)
    for b in range(residual.shape[0]):
        top = np.int32(0)
        for i in range(residual.shape[1]):
            top = max(top, np.float32(residual[b, i] + gradient[b, i]).view(np.int32) & _MAGNITUDE)
        tops[b] = top
        largest = max(largest, top)
    return largest


@kernel
def _accumulate(
    residual: Floats, gradient: Floats, extra: np.float32, tops: Indices, masks: NDArray[np.uint64], ahead: int
) -> None:
    """`residual += gradient`, both (bins, length), and a bit for every element to be sent, 64 to a mask."""
    k = 0
    length = residual.shape[1]
    for b in range(residual.shape[0]):
        top = np.int32(tops[b]).view(np.float32)
        for base in range(0, length, 64):
            stop = min(base + 64, length)
            whole = base + (stop - base) // LANES * LANES
            mask = np.uint64(0)
            for i in range(base, whole, LANES):
                mask |= add_and_test(residual, gradient, b * length + i, extra, top, ahead) << np.uint64(i - base)
            for i in range(whole, stop):
                total = residual[b, i] + gradient[b, i]
                residual[b, i] = total
                sent = (abs(total + gradient[b, i] * extra) >= top) & (total != 0)
                mask |= np.uint64(sent) << np.uint64(i - base)
            masks[k] = mask
            k += 1


@kernel
def _write(
    residual: Floats,
    tops: Indices,
    masks: NDArray[np.uint64],
    words: Words,
    written: int,
    run: int,
    sums: NDArray[np.float64],
) -> tuple[int, int]:
    """Words of a block, (bins, length), from its masks; adds to sums: bin maxima, |G| sent, elements sent.

    `run` is the number of empty bins just before, already written; the new values of `written` and `run` are returned.
    """
    minus = np.uint32(words.itemsize * 8 - 2)
    empty = (1 << minus) - 1
    last = 2 << minus
    longest = (4 << minus) - 1
    bits = residual.view(np.uint32)
    maxima, magnitudes, k, length = sums[0], sums[1], 0, residual.shape[1]
    sent = 0
    for b in range(residual.shape[0]):
        maxima += np.int32(tops[b]).view(np.float32)
        before = written
        for base in range(0, length, 64):
            mask = masks[k]
            k += 1
            while mask != 0:
                i = base + lowest_bit(mask)
                mask &= mask - ONE
                words[written] = i | (bits[b, i] >> np.uint32(31)) << minus
                written += 1
                magnitudes += abs(residual[b, i])
        if written > before:
            words[written - 1] |= last
            sent += written - before
            run = 0
        elif run == 0:
            words[written] = empty | last
            written += 1
            run = 1
        elif run == 1:
            words[written - 1] = empty
            words[written] = 2
            written += 1
            run = 2
        else:
            run += 1
            words[written - 1] = run
            if run == longest:
                run = 0
    sums[0], sums[1] = maxima, magnitudes
    sums[2] += sent
    return written, run


@kernel
def encode_segment(
    gradient: Floats,
    residual: Floats,
    bin_length: int,
    factor: float,
    words: Words,
    offsets: NDArray[np.uint32],
    maxima: NDArray[np.float64],
    scales: Floats,
) -> tuple[bool, int]:
    """`residual += gradient`, float32 (n,), and the words of what is to be sent; returns (all finite, words written).

    words: (n,) or more, which is always enough.  For each tile: offsets, its first word; maxima, the sum of max |G| of
    its bins, for `layer_scale`; scales, the mean |G| of its sent elements, 0 where there are none; all sums in order,
    in float64.  A block with a sum that is not finite is not added; then the segment has no words, and the other three
    outputs mean nothing.
    Memory: one pass (2 reads, 1 write) and the words.
    """
    if not 0 < bin_length <= 16383 or (bin_length <= 63) != (words.itemsize == 1):
        raise ValueError("bins of 1 to 63 elements need words of uint8, bins of 64 to 16383 words of uint16")
    if residual.size != gradient.size or words.size < gradient.size:
        raise ValueError("residual and words must be as long as the gradient")
    whole = gradient.size // bin_length
    bins = (gradient.size + bin_length - 1) // bin_length
    block, tile = block_bins(bin_length), tile_bins(bin_length)
    if min(offsets.size, maxima.size, scales.size) < (bins + tile - 1) // tile:
        raise ValueError("offsets, maxima and scales need an element for every tile")
    extra = np.float32(np.float32(factor) - np.float32(1.0))
    tops = np.empty(block, np.int32)
    masks = np.empty(block * ((bin_length + 63) // 64), np.uint64)
    sums = np.zeros(3, np.float64)
    finite, written, run = True, 0, 0
    for first in range(0, bins, block):
        if first % tile == 0:
            offsets[first // tile] = written
            sums[:] = 0.0
            run = 0
        start, stop = first * bin_length, min(first + block, whole) * bin_length
        while start < min((first + block) * bin_length, gradient.size):  # whole bins, then perhaps the short one
            if stop <= start:
                stop = gradient.size
            length = min(bin_length, stop - start)
            r, g = residual[start:stop].reshape(-1, length), gradient[start:stop].reshape(-1, length)
            if _largest(r, g, tops) >= _INFINITY:
                finite = False
            else:
                _accumulate(r, g, extra, tops, masks, block * bin_length)
                if finite:
                    written, run = _write(r, tops, masks, words, written, run, sums)
            start = stop
        maxima[first // tile] = sums[0]
        scales[first // tile] = sums[1] / sums[2] if sums[2] > 0 else 0.0
    return finite, written if finite else 0


@kernel
def layer_scale(maxima: NDArray[np.float64], bins: int) -> float:
    """The paper's scale of a segment, a float32: the mean over all bins of max |G|, from the sums of the tiles."""
    total = 0.0
    for tile in range(maxima.size):
        total += maxima[tile]
    return float(np.float32(total / bins)) if bins > 0 else 0.0


@kernel
def cut_segment(
    words: Words, offsets: NDArray[np.uint32], bins: int, bin_length: int, first_bin: int, capacity: int, out: Words
) -> tuple[int, int]:
    """Copy to `out` the words of as many bins as fit into `capacity` words, from first_bin on, cyclically.

    words and offsets are what `encode_segment` wrote for a segment of `bins` bins.  Returns (bins, words written).
    The last bin may lose its later words, so that one word of capacity is enough to go on.
    """
    minus = words.itemsize * 8 - 2
    empty, last = (1 << minus) - 1, 2 << minus
    tile = tile_bins(bin_length)
    done, written = 0, 0
    bin_now = first_bin // tile * tile
    position = int(offsets[first_bin // tile]) if bins > 0 else 0
    room = min(capacity, out.size)
    while done < bins and written < room:
        if bin_now == bins:
            bin_now, position = 0, 0
        ahead = first_bin - bin_now if done == 0 else 0  # bins before the first one wanted
        if words[position] & empty == empty:
            run, size = (1, 1) if words[position] & last else (int(words[position + 1]), 2)
            wanted = min(run - ahead, bins - done)
            if wanted > 1 and room - written == 1:
                wanted = 1
            if wanted > 0:
                out[written] = empty | last if wanted == 1 else empty
                if wanted > 1:
                    out[written + 1] = wanted
                written += 1 if wanted == 1 else 2
                done += wanted
        else:
            run, size = 1, 1
            while not words[position + size - 1] & last:
                size += 1
            if ahead < 1:
                fitting = min(size, room - written)
                for i in range(fitting):  # an assignment of slices compiles the text of its error for a second
                    out[written + i] = words[position + i]
                written += fitting
                out[written - 1] |= last
                done += 1
        bin_now += run
        position += size
    return done, written


@kernel
def _decode_bins(
    words: Words,
    position: int,
    stop: int,
    bin_length: int,
    scales: Floats,
    out: Floats,
    multiplier: np.float32,
    bin_now: int,
    bin_stop: int,
) -> int:
    """Decode bins bin_now to bin_stop from words[position:stop]; returns the next position, or a negative error.

    Words of 16 bits are read in batches and added after that: the cache misses of bare additions overlap, which takes
    half the time.  Words of 8 bits touch nearly every cache line; there are no misses to hide.
    """
    minus = np.uint32(words.itemsize * 8 - 2)
    last = np.uint32(minus + 1)
    empty = (1 << minus) - 1
    tile = tile_bins(bin_length)
    places = np.empty(_BATCH, np.uint64)
    values = np.empty(_BATCH, np.float32)
    while bin_now < bin_stop:
        number = bin_now // tile
        tile_stop = min((number + 1) * tile, bin_stop)
        value = np.float32(scales[number if scales.size > 1 else 0] * multiplier).view(np.uint32)
        while bin_now < tile_stop:
            count = 0
            while bin_now < tile_stop and count < _BATCH:
                if position >= stop:
                    return STREAM_ENDS
                word = np.uint32(words[position])
                position += 1
                index = int(word & np.uint32(empty))
                if index == empty:
                    run = 1
                    if word >> last == 0:
                        if position >= stop:
                            return STREAM_ENDS
                        run = int(words[position])
                        position += 1
                    if run < 1 or bin_now + run > tile_stop:
                        return RUN_TOO_LONG
                    bin_now += run
                    continue
                element = bin_now * bin_length + index
                if index >= bin_length or element >= out.size:
                    return INDEX_TOO_LARGE
                # The sign as a bit, not as a branch: half of the branches would be mispredicted.
                signed = np.uint32(value ^ ((word >> minus) & np.uint32(1)) << np.uint32(31)).view(np.float32)
                if words.itemsize == 1:
                    out[element] += signed
                else:
                    places[count] = element
                    values[count] = signed
                    count += 1
                bin_now += int(word >> last)
            for i in range(count):
                out[places[i]] += values[i]
    return position


@kernel
def decode_segment(
    words: Words, bin_length: int, scales: Floats, out: Floats, multiplier: float, first_bin: int, bins: int
) -> int:
    """`out[e] += sign * (scale * multiplier)` for every element in `bins` bins from first_bin on, cyclically.

    words: exactly those of these bins.  scales float32: one for the segment, or one for each tile of all of it.  out
    float32 (n,).  With -1 as multiplier and the residual as out, takes out what was sent.  Returns 0, or a
    negative number for malformed words; out is then partly written, never out of bounds.
    Memory: the words, and the cache lines they point to, read and written.
    """
    total = (out.size + bin_length - 1) // bin_length
    tile = tile_bins(bin_length)
    if not 0 <= bins <= total or not 0 <= first_bin <= max(total - 1, 0):
        return BINS_WRONG
    if scales.size != 1 and scales.size < (total + tile - 1) // tile:
        return SCALES_WRONG
    factor = np.float32(multiplier)
    end = min(first_bin + bins, total)
    position = _decode_bins(words, 0, words.size, bin_length, scales, out, factor, first_bin, end)
    if position >= 0:
        around = first_bin + bins - end
        position = _decode_bins(words, position, words.size, bin_length, scales, out, factor, 0, around)
    if position < 0:
        return position
    return WORDS_LEFT if position < words.size else 0


@kernel
def decode_all(
    words: Words,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    bin_length: int,
    scales: Floats,
    out: Floats,
    multiplier: float,
    first_bins: NDArray[np.int64],
    bins: NDArray[np.int64],
) -> tuple[int, int]:
    """Zero in `out`, then `decode_segment` for each rank in order; returns (0 or an error, rank it is in).

    words[starts[rank] : stops[rank]] is the message of a rank, scales (ranks, 1 or tiles) has its scales.  When all
    messages are whole they are added tile by tile, which takes 0.5 to 1.0 of
    the time, with the same bits.
    Memory: the words, one write pass, and the cache lines of cut messages.
    """
    total = (out.size + bin_length - 1) // bin_length
    tile = tile_bins(bin_length)
    ranks = starts.size
    whole = scales.shape[1] == 1 or scales.shape[1] >= (total + tile - 1) // tile
    for rank in range(ranks):
        if not 0 <= starts[rank] <= stops[rank] <= words.size:
            return STREAM_ENDS, rank
        whole = whole and first_bins[rank] == 0 and bins[rank] == total
    if not whole:
        out[:] = np.float32(0.0)
        for rank in range(ranks):
            message = words[starts[rank] : stops[rank]]
            code = decode_segment(message, bin_length, scales[rank], out, multiplier, first_bins[rank], bins[rank])
            if code < 0:
                return code, rank
        return 0, 0
    factor = np.float32(multiplier)
    positions = starts.copy()
    for first in range(0, total, tile):
        end = min(first + tile, total)
        out[first * bin_length : end * bin_length] = np.float32(0.0)
        for rank in range(ranks):
            position = _decode_bins(
                words, positions[rank], stops[rank], bin_length, scales[rank], out, factor, first, end
            )
            if position < 0:
                return position, rank
            positions[rank] = position
    for rank in range(ranks):
        if positions[rank] < stops[rank]:
            return WORDS_LEFT, rank
    return 0, 0
