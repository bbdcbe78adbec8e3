"""Momentum SGD in update space: momentum, error and detached point in one pass.

Arrays are flat, contiguous float32, one parameter at a time; `momentum` is empty where there is none. All kernels take the
same step as `torch.optim.SGD`, from `options`, float32 (5,) = lr, mu, decay, scale of the gradient, and 1 for Nesterov's:

    d = scale * gradient + decay * point;   m = mu * m + d;   update = lr * m     (lr * d, lr * (d + mu * m))

Equal to `reference.updates` bit for bit. The conditions inside the loops do not depend on the element: the compiler makes a
vectorised loop of each case.

The kernels whose names begin with `all_` do the same to all parameters in one call, since a call with seven arrays costs as
much as a small parameter. They find the arrays by their addresses:

    rows     int64 (parameters, 6): shared, error, momentum (0 where there is none), gradient, point, elements
    options  float32 (parameters, 5)
    places   int64 (blocks, 4): row, offset in the buffer, length, start in the parameter

The caller keeps what the addresses point to alive.
"""

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from thinwire.kernels.cpu._jit import Floats, Offsets, kernel
from thinwire.kernels.cpu._masks import pointer_to
from thinwire.kernels.cpu._streams import ALIGNMENT, WIDTH, advance_nesterov, advance_with, advance_without

CACHED = 1 << 20
"""Elements of a model that fits the cache, so that its parameters are still there after a step."""
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST = np.float32(np.finfo(np.float32).max)


@kernel
def largest(x: Floats) -> float:
    """The largest magnitude in x, float32 (n,); infinite or NaN if any element is.  Memory: one read pass."""
    bits = x.view(np.int32)
    most = np.int32(0)
    for i in range(bits.size):
        most = max(most, bits[i] & _MAGNITUDE)  # magnitudes are ordered as their bits are, and NaN comes last
    return float(np.array([most], np.int32).view(np.float32)[0])


@kernel
def squares(x: Floats) -> float:
    """Sum of squares in float64, so that all ranks get the same number: element i into sum i % 4, these in a fixed order.

    A single sum would be bound by the latency of additions.  Memory: one read pass.
    """
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = x.size - x.size % 4
    for i in range(0, whole, 4):
        p, q, r, s = np.float64(x[i]), np.float64(x[i + 1]), np.float64(x[i + 2]), np.float64(x[i + 3])
        a, b, c, d = a + p * p, b + q * q, c + r * r, d + s * s
    for i in range(whole, x.size):
        p = np.float64(x[i])
        if i - whole == 0:
            a += p * p
        elif i - whole == 1:
            b += p * p
        else:
            c += p * p
    return (a + b) + (c + d)


@kernel
def _pending(error: Floats, momentum: Floats, gradient: Floats, point: Floats, options: Floats, out: Floats) -> None:
    lr, mu, decay, scale, nesterov = options[0], options[1], options[2], options[3], options[4] != 0.0
    with_momentum, with_decay = momentum.size != 0, decay != 0.0
    for i in range(out.size):
        d = gradient[i] * scale
        if with_decay:
            d += decay * point[i]
        if with_momentum:
            m = mu * momentum[i] + d
            d = d + mu * m if nesterov else m
        out[i] = error[i] + lr * d


@kernel
def pending(
    error: Floats, momentum: Floats, gradient: Floats, point: Floats, options: Floats, start: int, out: Floats
) -> None:
    """error + update on the block of out.size elements that begins at `start` and wraps around; nothing else changes.

    Memory: the block.
    """
    first = min(out.size, error.size - start)
    for begin, count, at in ((start, first, 0), (0, out.size - first, first)):
        part = slice(begin, begin + count)
        _pending(error[part], momentum[part], gradient[part], point[part], options, out[at : at + count])


@kernel
def _advance(
    shared: Floats, error: Floats, momentum: Floats, gradient: Floats, point: Floats, options: Floats, strength: float
) -> bool:
    lr, mu, decay, scale, nesterov = options[0], options[1], options[2], options[3], options[4] != 0.0
    with_momentum, with_decay, factor = momentum.size != 0, decay != 0.0, np.float32(strength)
    bad = False
    for i in range(error.size):
        d = gradient[i] * scale
        if with_decay:
            d += decay * point[i]
        if with_momentum:
            m = mu * momentum[i] + d
            momentum[i] = m
            d = d + mu * m if nesterov else m
        total = error[i] + lr * d
        bad |= not (abs(total) <= _LARGEST)
        error[i] = total
        point[i] = shared[i] - factor * total
    return not bad


@kernel
def _advance_past_cache(
    shared: Floats, error: Floats, momentum: Floats, gradient: Floats, point: Floats, options: Floats, strength: float
) -> bool:
    lr, mu, scale, factor = options[0], options[1], options[3], np.float32(strength)
    bad = 0
    if momentum.size == 0:
        for i in range(0, point.size, WIDTH):
            bad |= advance_without(shared, error, momentum, gradient, point, i, lr, mu, scale, factor)
    elif options[4] != 0.0:
        for i in range(0, point.size, WIDTH):
            bad |= advance_nesterov(shared, error, momentum, gradient, point, i, lr, mu, scale, factor)
    else:
        for i in range(0, point.size, WIDTH):
            bad |= advance_with(shared, error, momentum, gradient, point, i, lr, mu, scale, factor)
    return bad == 0


@kernel
def advance(
    shared: Floats,
    error: Floats,
    momentum: Floats,
    gradient: Floats,
    point: Floats,
    options: Floats,
    strength: float,
    past: bool,
) -> bool:
    """A step before an exchange: momentum, error += update, point = shared - strength * error.

    past  write the point with non-temporal stores, for large models; not with decay, which reads it
    Returns False if an error is not finite afterwards.
    Memory: one pass (4 reads, 3 writes; one read more with decay, one read and one write less without momentum).
    """
    whole = 0
    if past and options[2] == 0.0 and point.ctypes.data % ALIGNMENT == 0:
        whole = point.size - point.size % WIDTH
    head, rest = slice(0, whole), slice(whole, point.size)
    good = _advance_past_cache(
        shared[head], error[head], momentum[head], gradient[head], point[head], options, strength
    )
    return good & _advance(shared[rest], error[rest], momentum[rest], gradient[rest], point[rest], options, strength)


@kernel
def drift(error: Floats, momentum: Floats, gradient: Floats, point: Floats, options: Floats) -> None:
    """A local step without exchange: momentum, error += update, point -= update.

    Memory: one pass (4 reads, 3 writes; one read and one write less without momentum).
    """
    lr, mu, decay, scale, nesterov = options[0], options[1], options[2], options[3], options[4] != 0.0
    with_momentum = momentum.size != 0
    for i in range(error.size):
        d = gradient[i] * scale + decay * point[i]
        if with_momentum:
            m = mu * momentum[i] + d
            momentum[i] = m
            d = d + mu * m if nesterov else m
        update = lr * d
        error[i] += update
        point[i] -= update


@kernel
def settle(shared: Floats, error: Floats, point: Floats, start: int, mean: Floats) -> None:
    """The block that was exchanged: shared -= mean, error = 0, point = shared.  Memory: the block."""
    first = min(mean.size, error.size - start)
    for begin, count, at in ((start, first, 0), (0, mean.size - first, first)):
        for i in range(count):
            value = shared[begin + i] - mean[at + i]
            shared[begin + i] = value
            error[begin + i] = np.float32(0.0)
            point[begin + i] = value


@kernel
def _at(address: int, elements: int) -> Floats:
    return carray(pointer_to(address), elements)


@kernel
def all_within(rows: Offsets, limit: float) -> bool:
    """Whether all gradients are finite, and none is larger than `limit`.  Memory: one read pass."""
    within = True
    for i in range(rows.shape[0]):
        within &= largest(_at(rows[i, 3], rows[i, 5])) <= limit
    return within


@kernel
def _momentum(row: Offsets) -> Floats:
    return _at(row[2], row[5] if row[2] != 0 else 0)


@kernel
def all_pending(rows: Offsets, options: Floats, places: Offsets, out: Floats) -> None:
    """`pending` of all places, each to its part of `out`.  Memory: the blocks."""
    for k in range(places.shape[0]):
        row, size, part = rows[places[k, 0]], rows[places[k, 0], 5], out[places[k, 1] : places[k, 1] + places[k, 2]]
        error, gradient, point = _at(row[1], size), _at(row[3], size), _at(row[4], size)
        pending(error, _momentum(row), gradient, point, options[places[k, 0]], places[k, 3], part)


@kernel
def all_advance(rows: Offsets, options: Floats, strength: float, places: Offsets, mean: Floats) -> bool:
    """`advance` of the parameters of all places, each followed by its `settle` while it is in the cache.

    mean is empty if it has not arrived yet: `all_settle` is then called later.
    """
    good, past = True, rows[:, 5].sum() > CACHED
    for k in range(places.shape[0]):
        row, size, here = rows[places[k, 0]], rows[places[k, 0], 5], options[places[k, 0]]
        shared, error, gradient, point = _at(row[0], size), _at(row[1], size), _at(row[3], size), _at(row[4], size)
        good &= advance(shared, error, _momentum(row), gradient, point, here, strength, past)
        if mean.size:
            settle(shared, error, point, places[k, 3], mean[places[k, 1] : places[k, 1] + places[k, 2]])
    return good


@kernel
def all_drift(rows: Offsets, options: Floats) -> None:
    """`drift` of all parameters."""
    for i in range(rows.shape[0]):
        row, size = rows[i], rows[i, 5]
        drift(_at(row[1], size), _momentum(row), _at(row[3], size), _at(row[4], size), options[i])


@kernel
def all_settle(rows: Offsets, places: Offsets, mean: Floats) -> None:
    """`settle` of all places, each with its part of `mean`.  Memory: the blocks."""
    for k in range(places.shape[0]):
        row, size, part = rows[places[k, 0]], rows[places[k, 0], 5], mean[places[k, 1] : places[k, 1] + places[k, 2]]
        settle(_at(row[0], size), _at(row[1], size), _at(row[4], size), places[k, 3], part)
