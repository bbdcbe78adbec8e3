"""PowerSGD: low-rank approximation of gradient matrices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels, ranges
from . import draws
from .base import Codec, CodecState, Estimate, GroupInfo, ParameterInfo, Steps, Sum

_LARGEST = 1e36  # larger factors could overflow in the product; their matrix stays in the residual

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter as rows x columns; its factors begin at `left_at` and `right_at` of the two sums."""

    name: str
    offset: int
    rows: int
    columns: int
    left_at: int
    right_at: int

    @property
    def elements(self) -> slice:
        return slice(self.offset, self.offset + self.rows * self.columns)


def _empty() -> Tensor:
    return torch.empty(0)


@dataclass
class LowRankState(CodecState):
    """`basis` holds the right factors that the next step starts from; `coming` becomes the basis in `commit`."""

    matrices: list[Matrix] = field(default_factory=list)
    dense: list[slice] = field(default_factory=list)
    basis: Tensor = field(default_factory=_empty)
    coming: Tensor = field(default_factory=_empty)
    first: Tensor = field(default_factory=_empty)
    """Left factors, dense part, tail."""
    second: Tensor = field(default_factory=_empty)
    """Right factors."""
    own: Tensor = field(default_factory=_empty)
    """This rank's right factors before the sum."""
    kept: Tensor = field(default_factory=_empty)
    """This rank's dense part before the sum."""
    sent: bool = False

    saved: ClassVar[tuple[str, ...]] = ("basis",)
    agreed: ClassVar[tuple[str, ...]] = ("basis",)
    common: ClassVar[tuple[str, ...]] = ("basis",)

    def check(self) -> None:
        ranges.array("basis", self.basis)


@dataclass(frozen=True)
class LowRank(Codec):
    """Each matrix as the product of two thin ones, found by one step of power iteration (PowerSGD).

    A parameter with two or more dimensions is a matrix of shape[0] rows where that is smaller: (rows + columns) * rank < rows
    * columns. Everything else is sent dense in the first sum. With M = residual + gradient of a rank: P = mean of M Q, made
    orthonormal; Q = mean of M' P; the result is P Q', and the residual becomes M - P (M' P)'. The next step starts from this
    Q; a column that became zero is redrawn.

    Bytes: 4 * rank * (rows + columns) per matrix and 4 per element of the rest, all-reduced, in two rounds.
    Memory passes: the one that accumulates, one read per factor, one read and write for the residual, one write for the
    result; 8 * rank operations per element.
    Source: Vogels et al. 2019, "PowerSGD", algorithm 2, with each rank's residual taken against its own projection.
    """

    rank: int = 4
    seed: int = 0

    rounds: ClassVar[int] = 2
    rides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.whole("rank", self.rank, 1)
        ranges.whole("seed", self.seed, -ranges.SEEDS, ranges.SEEDS)

    def start(self, group: GroupInfo, rank: int, world: int) -> LowRankState:
        matrices, dense, left, right, rest = list[Matrix](), list[slice](), 0, 0, 0
        for parameter in group.parameters:
            shape = self._matrix(parameter)
            if shape is None:
                dense.append(slice(parameter.offset, parameter.offset + parameter.elements))
                rest += parameter.elements
            else:
                rows, columns = shape
                matrices.append(Matrix(parameter.name, parameter.offset, rows, columns, left, right))
                left, right = left + self.rank * rows, right + self.rank * columns
        state = LowRankState(group, rank, world, matrices=matrices, dense=dense)
        state.basis, state.coming = torch.zeros(right), torch.zeros(right)
        state.second, state.own = torch.zeros(right), torch.zeros(right)
        state.first, state.kept = torch.zeros(left + rest + group.tail), torch.zeros(rest)
        for matrix in matrices:
            values = draws.uniform(draws.generator(self.seed, matrix.name), self.rank * matrix.columns)
            self._right(state.basis, matrix).view(-1).copy_(torch.from_numpy(2.0 * values - 1.0))
        return state

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert isinstance(state, LowRankState)
        share = 1.0 / state.world  # before the sums: a mean of finite values is finite, their sum need not be
        state.sent = False
        finite = kernels.sliced.accumulate(residual.numpy(), gradient.numpy())
        state.first.zero_()
        if finite:
            for matrix in state.matrices:
                values = residual[matrix.elements].view(matrix.rows, matrix.columns)
                left = self._left(state.first, matrix)
                torch.mm(self._right(state.basis, matrix), values.t(), out=left)
                left.mul_(share) if _bounded(left) else left.zero_()
            for place, kept in self._dense(state):
                state.kept[kept] = residual[place]
            torch.mul(state.kept, share, out=self._rest(state))
        yield Sum(state.first, tail=True, finite=finite)
        if bool(torch.isnan(state.first[-1])):
            return  # void on all ranks; nothing was taken

        state.sent = True
        rest = self._rest(state)
        for place, kept in self._dense(state):
            gradient[place] = rest[kept]
            residual[place] = 0.0
        if not state.matrices:
            return
        for matrix in state.matrices:
            left, own = self._left(state.first, matrix), self._right(state.own, matrix)
            kernels.lowrank.orthonormalise(left.numpy())
            torch.mm(left, residual[matrix.elements].view(matrix.rows, matrix.columns), out=own)
            if not _bounded(own):
                own.zero_()
        torch.mul(state.own, share, out=state.second)
        yield Sum(state.second)
        for matrix in state.matrices:
            p, q = self._left(state.first, matrix).numpy(), self._right(state.second, matrix).numpy()
            kernels.lowrank.add_product(
                p, self._right(state.own, matrix).numpy(), -1.0, residual[matrix.elements].numpy()
            )
            kernels.lowrank.write_product(p, q, gradient[matrix.elements].numpy())
            self._prepare(matrix, q, self._right(state.coming, matrix).numpy(), state.step)

    def _prepare(self, matrix: Matrix, right: Floats, coming: Floats, step: int) -> None:
        """The basis of the next step, scaled to 1, so that products of small gradients do not underflow."""
        for row, values in enumerate(right):
            largest = np.abs(values).max()
            if largest > 0.0:
                np.divide(values, largest, out=coming[row])
            else:  # a zero column would stay zero, and the rank would shrink
                bits = draws.generator(self.seed, matrix.name, step, row)
                coming[row] = 2.0 * draws.uniform(bits, values.size) - 1.0

    def undo(self, residual: Tensor, state: CodecState) -> None:
        assert isinstance(state, LowRankState)
        if not state.sent:
            return
        for matrix in state.matrices:
            left, own = self._left(state.first, matrix).numpy(), self._right(state.own, matrix).numpy()
            kernels.lowrank.add_product(left, own, 1.0, residual[matrix.elements].numpy())
        for place, kept in self._dense(state):
            residual[place] += state.kept[kept]

    def commit(self, states: Sequence[CodecState]) -> None:
        for state in states:
            assert isinstance(state, LowRankState)
            state.basis, state.coming = state.coming, state.basis

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        elements = group.tail
        for parameter in group.parameters:
            shape = self._matrix(parameter)
            elements += self.rank * sum(shape) if shape else parameter.elements
        return Estimate(summed=4 * elements, passes=5.0 + 0.5 * self.rank)

    def _matrix(self, parameter: ParameterInfo) -> tuple[int, int] | None:
        """Rows and columns of a parameter where low rank saves bytes, else None."""
        if len(parameter.shape) < 2 or not parameter.elements:
            return None
        rows = parameter.shape[0]
        columns = parameter.elements // rows
        return (rows, columns) if (rows + columns) * self.rank < parameter.elements else None

    def _left(self, buffer: Tensor, matrix: Matrix) -> Tensor:
        return buffer[matrix.left_at : matrix.left_at + self.rank * matrix.rows].view(self.rank, matrix.rows)

    def _right(self, buffer: Tensor, matrix: Matrix) -> Tensor:
        return buffer[matrix.right_at : matrix.right_at + self.rank * matrix.columns].view(self.rank, matrix.columns)

    @staticmethod
    def _rest(state: LowRankState) -> Tensor:
        """The dense part of the first sum."""
        end = state.first.numel() - state.group.tail
        return state.first[end - state.kept.numel() : end]

    @staticmethod
    def _dense(state: LowRankState) -> Iterator[tuple[slice, slice]]:
        """Slices of each dense parameter in the group and in the dense part."""
        at = 0
        for place in state.dense:
            size = place.stop - place.start
            yield place, slice(at, at + size)
            at += size


def _bounded(factor: Tensor) -> bool:
    """Whether its products stay finite; false for NaN."""
    low, high = torch.aminmax(factor)
    return bool(low >= -_LARGEST) and bool(high <= _LARGEST)
