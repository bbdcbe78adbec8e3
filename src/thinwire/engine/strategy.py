"""Strategy of an exchange: the codec and chain of each tensor, one for all of them or those of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..chains.chain import choose
from ..codecs import Codec, parse
from ..errors import PlanError
from ..planner.plan import Plan
from .layout import Exclude, Layout, Run, TensorInfo, build, lay_out


@dataclass(frozen=True)
class Assignment:
    """Tensors that travel alike: those of one group of a plan, by name, or all of them."""

    codec: Codec
    chain: str = ""
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Strategy:
    """How a wire exchanges: one part without a plan, otherwise one for each of its groups."""

    assignments: tuple[Assignment, ...]
    plan: Plan | None = None

    @staticmethod
    def of(given: Codec | str | Plan, chain: str | None = None) -> Strategy:
        """From what a user gives: a codec, its text (perhaps with a chain), or a plan."""
        if not isinstance(given, Plan):
            return Strategy((Assignment(*choose(given, chain)),))
        if chain is not None:
            raise PlanError(f"a plan names the chain of every group: leave chain={chain!r} out")
        assignments = [Assignment(*choose(group.codec, group.chain or None), group.names) for group in given.groups]
        return Strategy(tuple(assignments), given)

    @staticmethod
    def saved(codec: str, chain: str) -> Strategy:
        """From a state: there no chain means what the codec does by itself, and not the one that it has by default."""
        return Strategy.of(codec, chain) if chain else Strategy((Assignment(parse(codec)),))

    def check(self, tensors: Sequence[TensorInfo], world: int, ranks_per_node: int | None = None) -> None:
        """Refuse a plan of another job, with the first difference."""
        if self.plan is None:
            return
        self.plan.check({tensor.name: (tensor.shape, tensor.dtype) for tensor in tensors}, world, ranks_per_node)
        dtypes = {tensor.name: tensor.dtype for tensor in tensors}
        for place, group in enumerate(self.plan.groups):
            other = next((name for name in group.names if dtypes[name] != dtypes[group.names[0]]), None)
            if other is not None:
                first = group.names[0]
                raise PlanError(
                    f"group {place} of the plan: {first!r} is {dtypes[first]} and {other!r} is {dtypes[other]}, which "
                    "cannot travel in one buffer"
                )

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        facts: dict[str, Any] = {"codec": self.codec, "chain": self.chain}
        if self.plan is not None:
            facts["plan"] = [
                (str(assignment.codec), assignment.chain, assignment.names) for assignment in self.assignments
            ]
        return facts

    def __str__(self) -> str:
        if self.plan is None:
            return str(self.assignments[0].codec)
        counts = Counter(
            f"{assignment.codec} via {assignment.chain}" if assignment.chain else str(assignment.codec)
            for assignment in self.assignments
        )
        return "plan: " + ", ".join(f"{text} x{count}" if count > 1 else text for text, count in counts.items())

    @property
    def full(self) -> str:
        """The text of its codec and chain, or of its plan."""
        return f"{self} via {self.chain}" if self.chain else str(self)

    @property
    def codec(self) -> str:
        """The text of its codec; "plan" where it has several."""
        return str(self.assignments[0].codec) if self.plan is None else "plan"

    @property
    def chain(self) -> str:
        return self.assignments[0].chain if self.plan is None else ""

    @property
    def chains(self) -> list[str]:
        """Those that are not what a codec does by itself."""
        return sorted({assignment.chain for assignment in self.assignments if assignment.chain})

    @property
    def direct(self) -> bool:
        """Whether the exchange is nothing but the all-reduce of the gradients, in their own dtype."""
        return all(assignment.codec.direct and not assignment.chain for assignment in self.assignments)

    @property
    def adjustable(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for assignment in self.assignments for name in assignment.codec.adjustable))

    def at(self, step: int, settings: Mapping[str, float]) -> Strategy:
        """The same with the numbers that its codecs have in a step; see `Codec.at`."""
        assignments = tuple(
            Assignment(assignment.codec.at(step, settings), assignment.chain, assignment.names)
            for assignment in self.assignments
        )
        return Strategy(assignments, self.plan)

    def of_tensor(self, name: str) -> Assignment | None:
        return next(
            (assignment for assignment in self.assignments if assignment.names is None or name in assignment.names),
            None,
        )

    def layout(self, buckets: Sequence[Sequence[TensorInfo]], exclude: Exclude, min_elements: int) -> Layout:
        """Cut buckets into groups.

        Groups of a plan may be part of a bucket, or of several. Their tensors lie in the order of the buckets, so that a group
        that is a bucket is never copied, and they are sent in the order in which their last tensors come.
        """
        if self.plan is None:
            (assignment,) = self.assignments
            return build(buckets, assignment.codec, chain=assignment.chain, exclude=exclude, min_elements=min_elements)
        arrival = {tensor.name: place for place, tensor in enumerate(t for bucket in buckets for t in bucket)}
        tensors = {tensor.name: tensor for bucket in buckets for tensor in bucket}
        runs = []
        for assignment in self.assignments:
            assert assignment.names is not None
            names = sorted(assignment.names, key=arrival.__getitem__)
            runs.append(Run([tensors[name] for name in names], assignment.codec, assignment.chain))
        runs.sort(key=lambda run: max((arrival[tensor.name] for tensor in run.tensors), default=0))
        return lay_out(runs, exclude=exclude, min_elements=min_elements)
