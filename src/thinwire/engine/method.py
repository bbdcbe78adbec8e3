"""By which codec and chain each tensor travels: one for all of them, or those of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..codecs import Codec, parse
from ..errors import PlanError
from ..planner.plan import Plan
from ..schemes.chain import choose
from .layout import Exclude, Layout, Run, TensorInfo, build, lay_out


@dataclass(frozen=True)
class Part:
    """Tensors that travel alike: those of one group of a plan, by name, or all of them."""

    codec: Codec
    chain: str = ""
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Method:
    """How a wire exchanges: one part without a plan, otherwise one for each of its groups."""

    parts: tuple[Part, ...]
    plan: Plan | None = None

    @staticmethod
    def of(given: Codec | str | Plan, chain: str | None = None) -> Method:
        """From what a user gives: a codec, its text (perhaps with a chain), or a plan."""
        if not isinstance(given, Plan):
            return Method((Part(*choose(given, chain)),))
        if chain is not None:
            raise PlanError(f"a plan names the chain of every group: leave chain={chain!r} out")
        parts = [Part(*choose(group.codec, group.chain or None), group.names) for group in given.groups]
        return Method(tuple(parts), given)

    @staticmethod
    def saved(codec: str, chain: str) -> Method:
        """From a state: there no chain means what the codec does by itself, and not the one that it has by default."""
        return Method.of(codec, chain) if chain else Method((Part(parse(codec)),))

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
            facts["plan"] = [(str(part.codec), part.chain, part.names) for part in self.parts]
        return facts

    def __str__(self) -> str:
        if self.plan is None:
            return str(self.parts[0].codec)
        counts = Counter(f"{part.codec} via {part.chain}" if part.chain else str(part.codec) for part in self.parts)
        return "plan: " + ", ".join(f"{text} x{count}" if count > 1 else text for text, count in counts.items())

    @property
    def full(self) -> str:
        """The text of its codec and chain, or of its plan."""
        return f"{self} via {self.chain}" if self.chain else str(self)

    @property
    def codec(self) -> str:
        """The text of its codec; "plan" where it has several."""
        return str(self.parts[0].codec) if self.plan is None else "plan"

    @property
    def chain(self) -> str:
        return self.parts[0].chain if self.plan is None else ""

    @property
    def chains(self) -> list[str]:
        """Those that are not what a codec does by itself."""
        return sorted({part.chain for part in self.parts if part.chain})

    @property
    def direct(self) -> bool:
        """Whether the exchange is nothing but the all-reduce of the gradients, in their own dtype."""
        return all(part.codec.direct and not part.chain for part in self.parts)

    @property
    def adjustable(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for part in self.parts for name in part.codec.adjustable))

    def at(self, step: int, settings: Mapping[str, float]) -> Method:
        """The same with the numbers that its codecs have in a step; see `Codec.at`."""
        parts = tuple(Part(part.codec.at(step, settings), part.chain, part.names) for part in self.parts)
        return Method(parts, self.plan)

    def of_tensor(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.names is None or name in part.names), None)

    def layout(self, buckets: Sequence[Sequence[TensorInfo]], exclude: Exclude, min_elements: int) -> Layout:
        """Cut buckets into groups.

        Groups of a plan may be part of a bucket, or of several. Their tensors lie in the order of the buckets, so that a group
        that is a bucket is never copied, and they are sent in the order in which their last tensors come.
        """
        if self.plan is None:
            (part,) = self.parts
            return build(buckets, part.codec, chain=part.chain, exclude=exclude, min_elements=min_elements)
        arrival = {tensor.name: place for place, tensor in enumerate(t for bucket in buckets for t in bucket)}
        tensors = {tensor.name: tensor for bucket in buckets for tensor in bucket}
        runs = []
        for part in self.parts:
            assert part.names is not None
            names = sorted(part.names, key=arrival.__getitem__)
            runs.append(Run([tensors[name] for name in names], part.codec, part.chain))
        runs.sort(key=lambda run: max((arrival[tensor.name] for tensor in run.tensors), default=0))
        return lay_out(runs, exclude=exclude, min_elements=min_elements)
