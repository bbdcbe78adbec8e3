"""Cache of plans between runs of a job, each with the profile that it was made from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ..comm.world import TorchWorld
from ..engine.layout import TensorInfo
from ..engine.strategy import Strategy
from ..errors import ThinwireError
from ..kernels import cache
from ..planner.plan import Plan, Quality
from ..planner.profile import Cluster, Profile, Tensor, fingerprint

Found: TypeAlias = tuple[Plan, Profile | None] | str | None
"""A plan, with its profile if that is there too; or why it cannot be used."""


def place(tensors: Sequence[TensorInfo], cluster: Cluster, quality: Quality) -> Path:
    """Where the plan of such a job is kept by default."""
    mark = fingerprint([Tensor(t.name, t.elements, t.kind, t.dtype, 0.0, t.shape) for t in tensors], cluster)
    return cache.base() / "plans" / f"{mark}-{quality}.json"


def load(file: Path, quality: Quality, check: Callable[[Plan], None]) -> Found:
    """A plan, with its profile if that is there too; or why it cannot be used. `check` raises if it does not fit."""
    if not file.exists():
        return None
    try:
        plan = Plan.load(file)
        check(plan)
    except ThinwireError as error:
        return f"{file} is not used: {error}"
    if plan.quality != quality:
        return f"{file} is not used: it was made for quality {plan.quality!r}"
    with contextlib.suppress(ThinwireError):
        profile = Profile.load(_beside(file))
        return plan, profile if profile.fingerprint == plan.fingerprint else None
    return plan, None


def save(file: Path, plan: Plan, profile: Profile | None) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if profile is not None:
        profile.save(_beside(file))
    plan.save(file)


def _beside(file: Path) -> Path:
    return file.with_suffix(".profile.json")


class PlanFile:
    """The file of one job's plan; `path` is None where nothing is kept."""

    def __init__(
        self, given: str | Path | None, quality: Quality, tensors: Sequence[TensorInfo], world: TorchWorld
    ) -> None:
        self._quality, self._tensors, self._world = quality, tensors, world
        each = world.ranks_per_node or 1
        self.path: Path | None = place(tensors, Cluster(world.size // each, each), quality)
        if given is not None:
            self.path = Path(given) if str(given) else None

    def load(self) -> Found:
        return None if self.path is None else load(self.path, self._quality, self._check)

    def save(self, plan: Plan, profile: Profile | None) -> None:
        if self.path is not None:
            save(self.path, plan, profile)

    def _check(self, plan: Plan) -> None:
        Strategy.of(plan).check(self._tensors, self._world.size, self._world.ranks_per_node)
