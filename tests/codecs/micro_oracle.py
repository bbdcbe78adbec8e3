"""MiCRO with its defaults, written again from `docs/methods/micro.md` in plain numpy: all ranks in one place, one vector.

Nothing of the codec is used but the size of a message in bytes, which `docs/message-format.md` defines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire import messages
from thinwire.messages import ValueCoding

Floats = NDArray[np.float32]
BLOCKS = 1024


def bf16(values: Floats) -> Floats:
    return torch.from_numpy(values).bfloat16().float().numpy()


def up_to_64(size: int) -> int:
    return (size + 63) // 64 * 64


@dataclass
class Oracle:
    elements: int
    ranks: int
    density: float
    step: int = 0
    threshold: float = 0.0
    floor: float = 0.0
    usual: float = 0.0
    capacity: int = 0
    residuals: list[Floats] = field(init=False)
    borders: list[int] = field(init=False)
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(BLOCKS))
    requests: list[int] = field(default_factory=list)
    selected: dict[int, NDArray[np.intp]] = field(default_factory=dict)
    """By partition: the places that reached the threshold in the last step."""
    sent: dict[int, NDArray[np.intp]] = field(default_factory=dict)
    """And those of them that were sent."""

    def __post_init__(self) -> None:
        n = self.ranks
        self.residuals = [np.zeros(self.elements, np.float32) for _ in range(n)]
        quotient, rest = divmod(self.elements, n)
        self.borders = [part * quotient + min(part, rest) for part in range(n + 1)]
        share = messages.expected(-(-self.elements // n), -(-self.target // n), ValueCoding.NONE)
        self.capacity = up_to_64(max(80, share + share // 4))

    @property
    def target(self) -> int:
        return max(1, math.floor(self.density * self.elements))

    def exchange(self, gradients: list[Floats]) -> NDArray[np.float64]:
        """One step; returns the mean of what the ranks sent, not rounded."""
        for residual, gradient in zip(self.residuals, gradients, strict=True):
            residual += gradient
        mean = self._dense() if self.step == 0 else self._sparse()
        self.step += 1
        return mean

    def _dense(self) -> NDArray[np.float64]:
        everything = np.stack(self.residuals)
        self.threshold = self._first_threshold(np.abs(everything).ravel())
        self.floor = 1e-6 * self.threshold
        for residual in self.residuals:
            residual[:] = 0.0
        return everything.astype(np.float64).mean(0)

    def _first_threshold(self, magnitudes: Floats) -> float:
        """Magnitudes are counted in eight bins an octave; within a bin they are taken to be spread evenly."""
        k = self.target * self.ranks
        bins = np.sort(magnitudes.view(np.int32) >> 20)[::-1]
        place = int(bins[k - 1])  # where the k-th largest is
        above, inside = int((bins > place).sum()), int((bins == place).sum())
        low, high = (float(np.int32(edge << 20).view(np.float32)) for edge in (place, place + 1))
        return high - (k - above) / inside * (high - low)

    def _sparse(self) -> NDArray[np.float64]:
        sizes, requests = [], []
        allowed = math.ceil(1.05 * max(self.usual, self.target) / self.ranks)
        for rank, residual in enumerate(self.residuals):
            part = (self.step + rank) % self.ranks
            begin, end = self.borders[part], self.borders[part + 1]
            magnitudes = np.abs(residual[begin:end])
            chosen = np.flatnonzero((magnitudes >= np.float32(self.threshold)) & (magnitudes > 0))
            self.selected[part] = begin + chosen
            kept, size = self._largest_that_fit(chosen, magnitudes, end - begin)
            self.sent[part] = begin + kept
            sizes.append(size)
            requests.append(16 + -(-(size - 16) * min(len(chosen), allowed) // max(1, len(kept))))
        places = np.concatenate([self.sent[part] for part in range(self.ranks)])
        total = np.zeros(self.elements)
        for residual in self.residuals:
            rounded = bf16(residual[places])
            total[places] += rounded
            residual[places] -= rounded
        self._adapt(len(places), max(requests))
        return total / self.ranks

    def _largest_that_fit(
        self, chosen: NDArray[np.intp], magnitudes: Floats, elements: int
    ) -> tuple[NDArray[np.intp], int]:
        kept = chosen
        while True:
            buffer = np.zeros(self.capacity, np.uint8)
            packed = messages.pack(kept.astype(np.int32), None, elements, buffer, ValueCoding.NONE)
            if packed.entries == len(kept):
                return kept, packed.size
            order = np.argsort(-magnitudes[kept], kind="stable")  # of equal ones the first
            kept = np.sort(kept[order[: packed.entries]])

    def _adapt(self, count: int, request: int) -> None:
        wanted = sum(len(places) for places in self.selected.values())
        power = 0.25 if self.step <= 50 else 0.1
        factor = min(1.5, max(1 / 1.5, (wanted / self.target) ** power))
        self.threshold = max(self.threshold * factor, self.floor)

        self.usual += (0.3 if count > self.usual else 0.05) * (count - self.usual)
        self.requests = [*self.requests, request][-16:]
        most, least = max(self.requests), min(self.requests)
        self.capacity = up_to_64(max(80, most + max(most // 50, min(most // 4, (most - least) // 2))))

        block = -(-self.elements // BLOCKS)
        if block >= 32:
            counts = np.zeros(BLOCKS)
            for part, places in self.sent.items():
                if len(places):
                    each = len(self.selected[part]) / len(places)
                    counts += each * np.bincount(places // block, minlength=BLOCKS)
            self.weights = 0.95 * self.weights + 0.05 * counts
            reached = np.cumsum(self.weights + 0.05 * self.weights.sum() / BLOCKS)
            for part in range(1, self.ranks):
                full = int((reached < part / self.ranks * reached[-1]).sum())
                self.borders[part] = min((full + 1) * block, self.elements)
