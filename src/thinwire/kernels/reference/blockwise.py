"""Block-wise quantisation in plain torch; see `kernels.cpu.blockwise` for the arguments."""

import torch
from torch import Tensor

from thinwire.kernels.reference.basic import lane_sum

LANES = 64
LEVELS = 127.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
LARGEST_SCALE = float(torch.nextafter(torch.tensor(torch.finfo(torch.float32).max / LEVELS), torch.tensor(0.0)))
_POWERS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])


def _signs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, negative = lane_sum(x.abs().double(), LANES) / x.numel(), torch.signbit(x)
    scale = torch.tensor(mean, dtype=torch.float64).float()
    bits = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.int64)
    bits[: x.numel()] = negative
    return scale, (bits.view(-1, 8) * _POWERS).sum(1).to(torch.uint8), torch.where(negative, -scale, scale)


def _levels(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = (x.abs().max() / LEVELS).clamp(max=LARGEST_SCALE)
    if scale < SMALLEST_SCALE:
        scale = torch.tensor(0.0)
    levels = torch.round(x * (1.0 / scale)) if scale > 0 else torch.zeros_like(x)
    return scale, levels.to(torch.int8).view(torch.uint8), levels * scale


def encode(residual: Tensor, gradient: Tensor, blocks: Tensor, scales: Tensor, codes: Tensor, bits: int) -> bool:
    """`residual += gradient`, then take code * scale of each block out of it; True when every block was finite.

    A block whose sum is not finite stays as it was, with scale 0 and codes 0; so does one with a denormal scale for 8
    bits, which is added.
    """
    finite = True
    for b, (start, stop, place) in enumerate(blocks.tolist()):
        x = residual[start:stop] + gradient[start:stop]
        own = codes[place : place + -(-x.numel() * bits // 8)]
        if torch.isfinite(x).all():
            scales[b], own[:], sent = _signs(x) if bits == 1 else _levels(x)
            residual[start:stop] = x - sent
        else:
            finite = False
            scales[b], own[:] = 0.0, 0
    return finite


def add(out: Tensor, blocks: Tensor, scales: Tensor, codes: Tensor, factor: float, bits: int) -> None:
    """`out += code * scale * factor` in float32: (code * scale) * factor for 8 bits, sign * (scale * factor) for 1."""
    times = torch.tensor(factor, dtype=torch.float32)
    for scale, (start, stop, place) in zip(scales, blocks.tolist(), strict=True):
        own = codes[place : place + -(-(stop - start) * bits // 8)]
        if bits == 1:
            negative = ((own[:, None].long() & _POWERS) != 0).flatten()[: stop - start]
            out[start:stop] += torch.where(negative, -scale * times, scale * times)
        else:
            out[start:stop] += own.view(torch.int8).float() * scale * times
