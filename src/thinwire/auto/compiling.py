"""Compiles what `auto` needs while DDP trains alone, and agrees with all ranks on when it is there.

Between machines nobody waits: every few steps the ranks begin a reduction of two flags, and read it at the next ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.world import TorchWorld
from ..engine.compiler import CompilerProcess, missing
from ..log import logger

PERIOD = 4
"""Steps between two reductions."""

LONGEST = 60.0
"""Seconds after which `auto` gives up."""

State = Literal["compiling", "ready", "late"]


def state_of(ready: float, in_time: float) -> State:
    """From the least flags of all ranks: whether its machine has every kernel, and whether it can still be waited for."""
    return "ready" if ready else "compiling" if in_time else "late"


class Compiling:
    """One rank's part. All ranks call `begin` once, and then `step` after every step until it is ready or late."""

    def __init__(self, world: TorchWorld, texts: Sequence[str], longest: float = LONGEST) -> None:
        self._world, self._texts, self._longest = world, texts, longest
        self._child: CompilerProcess | None = None
        self._problem: str | None = None
        self._began = time.monotonic()
        self._steps = 0
        self._under_way: tuple[Any, Tensor] | None = None

    def begin(self) -> bool:
        """Whether all machines have what is needed; where it is missing, one rank of the machine starts a compiler."""
        work, flags = self._reduce()
        work.wait()
        if state_of(*flags.tolist()) == "ready":
            return True
        absent = missing(self._texts)
        if absent and self._first_of_machine():
            self._child = CompilerProcess(absent)
        return False

    def step(self) -> State:
        """What all ranks found some steps ago."""
        self._steps += 1
        if self._steps % PERIOD:
            return "compiling"
        last, self._under_way = self._under_way, self._reduce()
        if last is None:
            return "compiling"
        last[0].wait()
        found = state_of(*last[1].tolist())
        if found != "compiling":
            self._under_way[0].wait()
            self.close()
        return found

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _reduce(self) -> tuple[Any, Tensor]:
        if self._child is not None and self._problem is None and (problem := self._child.problem) is not None:
            self._problem = problem
            logger.warning("the compiler of this machine has failed: %s", problem)
        late = self._problem is not None or time.monotonic() - self._began > self._longest
        flags = torch.tensor([float(not missing(self._texts)), float(not late)])
        return dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._world.parent, async_op=True), flags

    def _first_of_machine(self) -> bool:
        """Whether this rank compiles for its machine. Where that cannot be told several do, one after the other."""
        if "LOCAL_RANK" in os.environ:
            return os.environ["LOCAL_RANK"] == "0"
        each = self._world.ranks_per_node
        return each is None or self._world.rank % each == 0
