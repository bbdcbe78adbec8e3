"""Contiguous blocks of several tensors: take them out of a flat vector, or add them to one.

A block of `length` elements begins at `start` within its tensor and wraps around its end.
"""

import numpy as np

from thinwire.kernels.cpu._jit import Floats, Offsets, kernel


@kernel
def take_blocks(
    residual: Floats, offsets: Offsets, sizes: Offsets, starts: Offsets, lengths: Offsets, out: Floats
) -> None:
    """Copy the blocks of all tensors to `out`, one after the other, and clear them.

    residual float32 (n,); offsets, sizes, starts, lengths int64 (tensors,); out float32 (sum of lengths,).
    Memory: the blocks, read and written.
    """
    at = 0
    for tensor in range(offsets.size):
        first = min(lengths[tensor], sizes[tensor] - starts[tensor])
        begin = offsets[tensor] + starts[tensor]
        for i in range(first):  # an assignment of slices compiles the text of its error for a second
            out[at + i] = residual[begin + i]
        residual[begin : begin + first] = np.float32(0.0)
        rest = lengths[tensor] - first
        begin = offsets[tensor]
        for i in range(rest):
            out[at + first + i] = residual[begin + i]
        residual[begin : begin + rest] = np.float32(0.0)
        at += first + rest


@kernel
def add_blocks(
    target: Floats, offsets: Offsets, sizes: Offsets, starts: Offsets, lengths: Offsets, values: Floats, scale: float
) -> None:
    """Add the blocks in `values`, times `scale`, to their places in `target`; shapes as for `take_blocks`."""
    factor = np.float32(scale)
    at = 0
    for tensor in range(offsets.size):
        first = min(lengths[tensor], sizes[tensor] - starts[tensor])
        begin = offsets[tensor] + starts[tensor]
        for i in range(first):
            target[begin + i] += values[at + i] * factor
        begin = offsets[tensor]
        for i in range(lengths[tensor] - first):
            target[begin + i] += values[at + first + i] * factor
        at += lengths[tensor]
