"""Top-k by threshold in plain torch: measure, count, collect candidates, take the chosen ones; and what top-k means.

Tensors are flat, contiguous float32.  A place is selected when |x| > threshold; zeros never are.  Float sums are
float64, tile by tile of 4096 in order, and within a tile in the order written here.
"""

import torch
from torch import Tensor

from thinwire.kernels.reference.basic import TILE, accumulate, lane_sum
from thinwire.kernels.reference.coding import rounded

LANES = 64


def measure(x: Tensor) -> tuple[float, float, int]:
    """(sum |x|, max |x|, non-zeros).  Within a tile there are 64 partial sums, of every 64th element each."""
    total = 0.0
    for start in range(0, x.numel(), TILE):
        total += lane_sum(x[start : start + TILE].abs().double(), LANES)
    return total, float(x.abs().max()) if x.numel() else 0.0, int(torch.count_nonzero(x))


def accumulate_measure(residual: Tensor, gradient: Tensor) -> tuple[bool, float, float, int]:
    """`residual += gradient`, and of the result (finite, sum |x|, max |x|, non-zeros)."""
    finite = accumulate(residual, gradient)
    return finite, *measure(residual)


def _excess(values: Tensor, places: Tensor, threshold: float) -> float:
    """Sum of |value| - threshold, tile by tile of the places the values come from, in order."""
    total = 0.0
    tiles: dict[int, float] = {}
    for place, magnitude in zip(places.tolist(), values.abs().tolist(), strict=True):
        tiles[place // TILE] = tiles.get(place // TILE, 0.0) + (magnitude - threshold)
    for tile_total in tiles.values():
        total += tile_total
    return total


def collect(x: Tensor, threshold: float, ties: int, indices: Tensor, values: Tensor) -> tuple[int, float]:
    """The places with |x| > threshold, and among those with |x| == threshold the first `ties`: (wanted, excess).

    indices int32 (capacity,), ascending, and values float32 (capacity,).  wanted counts on when the buffers are full,
    excess is the sum of |x| - threshold over those written.
    """
    magnitudes = x.abs()
    equal = (magnitudes == threshold) & (magnitudes > 0)
    selected = (magnitudes > threshold) | (equal & (equal.cumsum(0) <= ties))
    places = torch.nonzero(selected).flatten()
    written = places[: indices.numel()]
    indices[: written.numel()] = written.int()
    values[: written.numel()] = x[written]
    return places.numel(), _excess(x[written], written, threshold)


def accumulate_collect(
    residual: Tensor, gradient: Tensor, threshold: float, indices: Tensor, values: Tensor
) -> tuple[bool, int, float]:
    """`residual += gradient`, and collect the candidates `|residual| > threshold`: (finite, wanted, excess)."""
    finite = accumulate(residual, gradient)
    return finite, *collect(residual, threshold, 0, indices, values)


def accumulate_take(
    residual: Tensor, gradient: Tensor, threshold: float, coding: int, indices: Tensor, values: Tensor
) -> tuple[bool, int, float]:
    """As `accumulate_collect`, but what is listed is taken: its value under `coding`; the rounding stays."""
    finite, wanted, excess = accumulate_collect(residual, gradient, threshold, indices, values)
    written = min(wanted, indices.numel())
    sent = rounded(values[:written], coding)
    residual[indices[:written].long()] -= sent
    values[:written] = sent
    return finite, wanted, excess


def count_above(x: Tensor, threshold: float) -> tuple[int, float]:
    """How many |x| > threshold, and the sum of |x| - threshold over them."""
    places = torch.nonzero(x.abs() > threshold).flatten()
    return places.numel(), _excess(x[places], places, threshold)


def histogram(x: Tensor, first: int, shift: int, counts: Tensor) -> int:
    """Count magnitudes by their bits: bin i has those in [first + (i << shift), first + ((i + 1) << shift)).

    counts int64 (bins,) is overwritten.  Returns how many lie above the last bin.
    """
    keys = (x.abs().view(torch.int32).long() - first) >> shift
    counts[:] = torch.bincount(keys[(keys >= 0) & (keys < counts.numel())], minlength=counts.numel())
    return int((keys >= counts.numel()).sum())


def take_above(residual: Tensor, indices: Tensor, values: Tensor, threshold: float, ties: int) -> tuple[int, float]:
    """Keep of the candidates those above the threshold, and the first `ties` of those at it; clear them in residual.

    indices int32 (m,) and values float32 (m,) are what `collect` wrote, and are compacted in place, in order.  Returns
    (kept, excess); this sum is over all that is kept, without tiles.
    """
    magnitudes = values.abs()
    equal = magnitudes == threshold
    selected = (magnitudes > threshold) | (equal & (equal.cumsum(0) <= ties))
    kept = int(selected.sum())
    indices[:kept], values[:kept] = indices[selected], values[selected]
    residual[indices[:kept].long()] = 0.0
    excess = 0.0
    for magnitude in values[:kept].abs().tolist():
        excess += magnitude - threshold
    return kept, excess


def top(x: Tensor, k: int) -> Tensor:
    """Places int64 (min(k, non-zeros),), ascending, of the k largest magnitudes, lowest index first among equals."""
    order = torch.sort(x.abs(), descending=True, stable=True).indices[: min(k, int(torch.count_nonzero(x)))]
    return order.sort().values
