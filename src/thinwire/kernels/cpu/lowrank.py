"""PowerSGD: orthonormalisation, and the product of two thin factors.

Ranks must get the same bits here on any CPU, which excludes matrix libraries: their order of additions depends on the
machine, the number of threads and the alignment.  Factors are float32 and C-contiguous: p (rank, rows),
q (rank, columns); a matrix is flat, row by row.  Equal to `reference.lowrank` bit for bit.
"""

import numpy as np

from thinwire.kernels.cpu._jit import Doubles, Floats, kernel

LANES = 8
TILE = 1024  # columns at a time: the part of q that a tile needs stays in the cache
DEPENDENT = 1e-6  # a row of which less than this share is left is rounding noise of the others


@kernel
def _dot(x: Doubles, y: Doubles, lanes: Doubles) -> float:
    lanes[:] = 0.0
    whole = x.size - x.size % LANES
    for row in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += x[row + lane] * y[row + lane]
    for lane in range(x.size - whole):
        lanes[lane] += x[whole + lane] * y[whole + lane]
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


@kernel
def orthonormalise(p: Floats) -> None:
    """Make the rows of p, float32 (rank, n), orthonormal; a row that depends on those before it becomes zero.

    Gram-Schmidt, twice, in float64 with 8 partial sums a dot product.  Memory: rank^2 passes over a row.
    """
    rank, size = p.shape
    basis = np.zeros((rank, size), np.float64)
    lanes = np.zeros(LANES, np.float64)
    for k in range(rank):
        x = basis[k]
        for i in range(size):
            x[i] = np.float64(p[k, i])
        before = np.sqrt(_dot(x, x, lanes))
        for _ in range(2):
            for j in range(k):
                y = basis[j]
                share = _dot(x, y, lanes)
                for i in range(size):
                    x[i] -= share * y[i]
        norm = np.sqrt(_dot(x, x, lanes))
        if norm <= DEPENDENT * before:
            x[:] = 0.0
        else:
            for i in range(size):
                x[i] /= norm
        for i in range(size):
            p[k, i] = np.float32(x[i])


@kernel
def _row(p: Floats, q: Floats, i: int, begin: int, end: int, out: Floats) -> None:
    """out = columns [begin, end) of row i of the product; four ranks at a time, added up before they are added on."""
    rank = p.shape[0]
    whole = rank - rank % 4
    if whole == 0:
        out[:] = np.float32(0.0)
    for k in range(0, whole, 4):
        a, b, c, d = p[k, i], p[k + 1, i], p[k + 2, i], p[k + 3, i]
        qa, qb, qc, qd = q[k, begin:end], q[k + 1, begin:end], q[k + 2, begin:end], q[k + 3, begin:end]
        if k == 0:
            for j in range(out.size):
                out[j] = a * qa[j] + b * qb[j] + c * qc[j] + d * qd[j]
        else:
            for j in range(out.size):
                out[j] += a * qa[j] + b * qb[j] + c * qc[j] + d * qd[j]
    for k in range(whole, rank):
        a, qa = p[k, i], q[k, begin:end]
        for j in range(out.size):
            out[j] += a * qa[j]


@kernel
def write_product(p: Floats, q: Floats, out: Floats) -> None:
    """out, float32 (rows * columns,), is the product of p transposed and q.  Memory: one write pass."""
    rows, columns = p.shape[1], q.shape[1]
    for begin in range(0, columns, TILE):
        end = min(begin + TILE, columns)
        for i in range(rows):
            _row(p, q, i, begin, end, out[i * columns + begin : i * columns + end])


@kernel
def add_product(p: Floats, q: Floats, factor: float, out: Floats) -> None:
    """out += factor * product of p transposed and q, with factor 1 or -1; the product is rounded first.

    Memory: one pass over out (1 read, 1 write).
    """
    rows, columns = p.shape[1], q.shape[1]
    times = np.float32(factor)
    product = np.empty(TILE, np.float32)
    for begin in range(0, columns, TILE):
        end = min(begin + TILE, columns)
        part = product[: end - begin]
        for i in range(rows):
            _row(p, q, i, begin, end, part)
            x = out[i * columns + begin : i * columns + end]
            for j in range(x.size):
                x[j] += times * part[j]
