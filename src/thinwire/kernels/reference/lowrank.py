"""PowerSGD in plain torch: orthonormalisation, and the product of two thin factors.

Factors are float32: p (rank, rows), q (rank, columns); a matrix is flat, row by row.
"""

import math

import torch
from torch import Tensor

from thinwire.kernels.reference.basic import lane_sum

LANES = 8
DEPENDENT = 1e-6


def orthonormalise(p: Tensor) -> None:
    """Make the rows orthonormal by Gram-Schmidt, twice; a row that depends on those before it becomes zero."""
    basis: list[Tensor] = []
    for row in p:
        x = row.double()
        before = math.sqrt(lane_sum(x * x, LANES))
        for _ in range(2):
            for y in basis:
                x = x - lane_sum(x * y, LANES) * y
        norm = math.sqrt(lane_sum(x * x, LANES))
        x = torch.zeros_like(x) if norm <= DEPENDENT * before else x / norm
        basis.append(x)
        row[:] = x.float()


def product(p: Tensor, q: Tensor) -> Tensor:
    """p transposed times q, flat: four ranks at a time, added up in order before they are added on."""
    total: Tensor | None = None
    whole = p.shape[0] - p.shape[0] % 4
    groups = [range(k, k + 4) for k in range(0, whole, 4)] + [range(k, k + 1) for k in range(whole, p.shape[0])]
    for group in groups:
        part: Tensor | None = None
        for k in group:
            term = torch.outer(p[k], q[k])
            part = term if part is None else part + term
        assert part is not None
        total = part if total is None else total + part
    return torch.zeros(p.shape[1] * q.shape[1]) if total is None else total.flatten()


def write_product(p: Tensor, q: Tensor, out: Tensor) -> None:
    """out is the product of p transposed and q."""
    out[:] = product(p, q)


def add_product(p: Tensor, q: Tensor, factor: float, out: Tensor) -> None:
    """out += factor * product of p transposed and q; the product is rounded first."""
    out += factor * product(p, q)
