"""Blocks of bytes with one scale each, in plain torch."""

import torch
from torch import Tensor

LEVELS = 127.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = float(torch.nextafter(torch.tensor(torch.finfo(torch.float32).max / LEVELS), torch.tensor(0.0)))


def encode(
    residual: Tensor, gradient: Tensor, starts: Tensor, stops: Tensor, places: Tensor, scales: Tensor, codes: Tensor
) -> bool:
    """`residual += gradient`, then take from each block codes * scale out of it; True when every block was finite.

    A block whose sum is not finite stays as it was, with scale 0 and codes 0; so does one with a denormal scale, which
    is added.
    """
    finite = True
    for b, (start, stop, place) in enumerate(zip(starts.tolist(), stops.tolist(), places.tolist(), strict=True)):
        x = residual[start:stop] + gradient[start:stop]
        good = bool(torch.isfinite(x).all())
        finite &= good
        scale = (x.abs().max() / LEVELS).clamp(max=LARGEST_SCALE) if good else torch.tensor(0.0)
        if scale < SMALLEST_SCALE:
            scale = torch.tensor(0.0)
            levels = torch.zeros_like(x)
        else:
            levels = torch.round(x * (1.0 / scale))
        scales[b] = scale
        codes[place : place + x.numel()] = levels.to(torch.int8).view(torch.uint8)
        if good:
            residual[start:stop] = x - levels * scale
    return finite


def add(
    out: Tensor, starts: Tensor, stops: Tensor, places: Tensor, scales: Tensor, codes: Tensor, factor: float
) -> None:
    """`out += (code * scale) * factor` in float32, each product rounded."""
    times = torch.tensor(factor, dtype=torch.float32)
    for b, (start, stop, place) in enumerate(zip(starts.tolist(), stops.tolist(), places.tolist(), strict=True)):
        levels = codes[place : place + stop - start].view(torch.int8).float()
        out[start:stop] += levels * scales[b] * times
