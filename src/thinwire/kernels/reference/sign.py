"""Blocks of bits with one scale each, in plain torch."""

import torch
from torch import Tensor

LANES = 64
_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])


def _mean(x: Tensor) -> Tensor:
    """The mean magnitude, float32: 64 partial sums in float64, of every 64th element each."""
    lanes = torch.zeros(LANES, dtype=torch.float64)
    for row in range(0, x.numel(), LANES):
        part = x[row : row + LANES].abs().double()
        lanes[: part.numel()] += part
    total = 0.0
    for lane in lanes.tolist():
        total += lane
    return torch.tensor(total / x.numel(), dtype=torch.float64).float()


def encode(
    residual: Tensor, gradient: Tensor, starts: Tensor, stops: Tensor, places: Tensor, scales: Tensor, codes: Tensor
) -> bool:
    """`residual += gradient`, then take from each block sign * scale out of it; True when every block was finite.

    A block whose sum is not finite stays as it was, with scale 0 and bits 0.
    """
    finite = True
    for b, (start, stop, place) in enumerate(zip(starts.tolist(), stops.tolist(), places.tolist(), strict=True)):
        x = residual[start:stop] + gradient[start:stop]
        bits = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.int64)
        if not torch.isfinite(x).all():
            finite = False
            scales[b] = 0.0
        else:
            negative = torch.signbit(x)
            bits[: x.numel()] = negative
            scales[b] = _mean(x)
            residual[start:stop] = x - torch.where(negative, -scales[b], scales[b])
        codes[place : place + bits.numel() // 8] = (bits.view(-1, 8) * _POWERS).sum(1).to(torch.uint8)
    return finite


def add(
    out: Tensor, starts: Tensor, stops: Tensor, places: Tensor, scales: Tensor, codes: Tensor, factor: float
) -> None:
    """`out += sign * (scale * factor)` in float32."""
    times = torch.tensor(factor, dtype=torch.float32)
    for b, (start, stop, place) in enumerate(zip(starts.tolist(), stops.tolist(), places.tolist(), strict=True)):
        packed = codes[place : place + -(-(stop - start) // 8)].long()
        negative = ((packed[:, None] & _POWERS) != 0).flatten()[: stop - start]
        out[start:stop] += torch.where(negative, -scales[b] * times, scales[b] * times)
