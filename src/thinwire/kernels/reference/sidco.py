"""SIDCo in plain torch: statistics of the magnitudes above a threshold, for one stage."""

import math

import torch
from torch import Tensor

from thinwire.kernels.reference.laplace import measure


def tail(x: Tensor, threshold: float) -> tuple[int, float, float]:
    """Of the |x| > threshold: how many, their sum, the smallest; (0, 0.0, infinity) when there is none."""
    above = x.abs() > threshold
    count = int(above.sum())
    total, _, _ = measure(torch.where(above, x, torch.zeros_like(x)))
    return count, total, float(x.abs()[above].min()) if count else math.inf
