"""Momentum SGD in update space, in plain torch; see `kernels.cpu.updates` for what the arguments are.

Every product and every sum is rounded on its own: `torch.add(..., alpha=...)` would round once for both.
"""

import torch
from torch import Tensor


def largest(x: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(x.abs().max()) if x.numel() else 0.0


def squares(x: Tensor) -> float:
    """Sum of squares in float64: element i into sum i % 4, these in a fixed order."""
    totals = [0.0, 0.0, 0.0, 0.0]
    for i, value in enumerate(x.double().tolist()):
        totals[i % 4] += value * value
    return (totals[0] + totals[1]) + (totals[2] + totals[3])


def step(momentum: Tensor, gradient: Tensor, point: Tensor, options: Tensor) -> tuple[Tensor, Tensor]:
    """The momentum after a step, and the update."""
    lr, mu, decay, scale, nesterov = options
    d = gradient * scale
    if decay != 0:
        d = d + decay * point
    if not momentum.numel():
        return momentum, lr * d
    momentum = mu * momentum + d
    return momentum, lr * (d + mu * momentum if nesterov else momentum)


def block(size: int, start: int, length: int) -> Tensor:
    """Indices of a block that wraps around."""
    return (start + torch.arange(length)) % max(size, 1)


def pending(
    error: Tensor, momentum: Tensor, gradient: Tensor, point: Tensor, options: Tensor, start: int, out: Tensor
) -> None:
    """error + update on a block."""
    _, update = step(momentum, gradient, point, options)
    out.copy_((error + update)[block(error.numel(), start, out.numel())])


def advance(
    shared: Tensor,
    error: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    point: Tensor,
    options: Tensor,
    strength: float,
) -> bool:
    """Momentum, error += update, point = shared - strength * error; whether the error is finite."""
    moved, update = step(momentum, gradient, point, options)
    momentum.copy_(moved)
    error.add_(update)
    point.copy_(detached(shared, error, strength))
    return bool(torch.isfinite(error).all())


def drift(error: Tensor, momentum: Tensor, gradient: Tensor, point: Tensor, options: Tensor) -> None:
    """Momentum, error += update, point -= update."""
    moved, update = step(momentum, gradient, point, options)
    momentum.copy_(moved)
    error.add_(update)
    point.sub_(update)


def settle(shared: Tensor, error: Tensor, point: Tensor, start: int, mean: Tensor) -> None:
    """On the block: shared -= mean, error = 0, point = shared."""
    places = block(error.numel(), start, mean.numel())
    shared[places] -= mean
    error[places] = 0.0
    point[places] = shared[places]


def detached(shared: Tensor, error: Tensor, strength: float) -> Tensor:
    """shared - strength * error: the point at which a rank computes its gradients."""
    return shared - strength * error
