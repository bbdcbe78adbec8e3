"""What MiCRO keeps between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import ranges
from .base import CodecState


@dataclass
class MicroState(CodecState):
    """Thresholds (one, or one a parameter), partition borders, and what this step selected on all ranks."""

    thresholds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    floors: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    borders: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    usual: float = 0.0
    """Slow average of the elements that all ranks together sent; sets the limit per rank."""
    steps: int = 0
    """Steps with a threshold; 0 until the dense first step has produced one."""
    ends: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    chosen: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    support: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    taken: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    buffer: Tensor = field(default_factory=lambda: torch.zeros(0))
    histogram: Tensor = field(default_factory=lambda: torch.zeros(0))
    count: int = 0
    """Elements sent."""
    wanted: int = 0
    """Elements that all ranks together selected, including those that did not fit."""
    sent_before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of them, how many were sent in the partitions before each border."""
    wanted_before: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """And how many were selected there."""
    imbalance: float = 1.0
    """The most that a rank selected over the mean."""
    velocity: Tensor = field(default_factory=lambda: torch.empty(0))
    """The momentum after the last valid step; empty without momentum."""
    coming: Tensor = field(default_factory=lambda: torch.empty(0))
    """The momentum after this step, taken over in `commit`."""

    agreed: ClassVar[tuple[str, ...]] = ("thresholds", "floors", "borders", "weights", "usual", "steps")
    saved: ClassVar[tuple[str, ...]] = (*agreed, "velocity")
    elementwise: ClassVar[tuple[str, ...]] = ("velocity",)
    common: ClassVar[tuple[str, ...]] = ("thresholds", "floors", "weights", "usual", "steps")

    def check(self) -> None:
        ends = int(self.borders[0]), int(self.borders[-1])
        if ends != (0, self.group.elements) or bool((self.borders[1:] < self.borders[:-1]).any()):
            raise ValueError(f"borders must ascend from 0 to {self.group.elements}, but are {self.borders.tolist()}")
        for name in ("thresholds", "floors", "weights"):
            ranges.array(name, getattr(self, name), 0.0)
        ranges.number("usual", self.usual, 0.0)
        ranges.whole("steps", self.steps, 0)
