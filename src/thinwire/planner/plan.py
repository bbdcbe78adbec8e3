"""Plan files: groups of tensors with their codecs and chains, and the predicted step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..chains import tree
from ..codecs import parse
from ..errors import ChainTextError, CodecTextError, PlanError
from ..ranges import Amount, Count, Real, Version
from .profile import Cluster, check_numbers, load_struct, save_struct

VERSION = 1

Quality = Literal["lossless", "high", "fast"]


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a group's exchange; `lane` is backward, codec, wire or cpu. Seconds since the start of backward."""

    name: str
    lane: str
    start: Real
    end: Real


class PlanTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the model that the plan is for."""

    name: str
    shape: tuple[Count, ...]
    dtype: str


class PlanGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensors that are exchanged together. An empty chain means the codec's own collectives."""

    names: tuple[str, ...]
    codec: str
    chain: str = ""
    operations: tuple[Operation, ...] = ()


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Groups in the order in which they are sent, the order in which backward completes them.

    predicted_seconds  step time with this plan; dense_seconds: all dense; bound_seconds: without communication
    loss               relative loss of the gradient, weighted over all tensors
    """

    version: Version
    fingerprint: str
    model: str
    cluster: Cluster
    quality: Quality
    search: str
    predicted_seconds: Amount
    bound_seconds: Amount
    dense_seconds: Amount
    tensors: tuple[PlanTensor, ...]
    groups: tuple[PlanGroup, ...]
    loss: Amount = 0.0
    search_seconds: Amount = 0.0
    remarks: tuple[str, ...] = ()

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read and validate a file; a `PlanError` names the invalid field."""
        plan = load_struct(path, Plan, "plan", PlanError)
        plan.validate(str(path))
        return plan

    def save(self, path: str | Path) -> None:
        self.validate("the plan to be saved")
        save_struct(path, self)

    def validate(self, where: str = "the plan") -> None:
        """Check that every tensor is in exactly one group, and that codecs and chains exist."""
        if self.version != VERSION:
            raise PlanError(f"{where}: version {self.version}, this thinwire reads {VERSION}")
        check_numbers(self, where, PlanError)
        known = {tensor.name for tensor in self.tensors}
        if len(known) != len(self.tensors):
            raise PlanError(f"{where}: a tensor is listed twice")
        seen: set[str] = set()
        for index, group in enumerate(self.groups):
            if not group.names:
                raise PlanError(f"{where}: group {index} is empty")
            try:
                parse(group.codec)
                if group.chain:
                    tree.parse(group.chain)
            except (CodecTextError, ChainTextError) as error:
                raise PlanError(f"{where}: group {index}: {error}") from None
            for name in group.names:
                if name in seen or name not in known:
                    problem = "stands in two groups" if name in seen else "is not among the plan's tensors"
                    raise PlanError(f"{where}: group {index}: {name!r} {problem}")
                seen.add(name)
        missing = next((tensor.name for tensor in self.tensors if tensor.name not in seen), None)
        if missing is not None:
            raise PlanError(f"{where}: {missing!r} is in no group")

    def check(
        self, tensors: Mapping[str, tuple[Sequence[int], str]], world: int, ranks_per_node: int | None = None
    ) -> None:
        """Raise `PlanError` for a job other than the planned one, naming the first difference.

        tensors: shape and dtype ("float32") of every gradient by name. Without `ranks_per_node`, nodes matter only if a
        chain uses them.
        """
        expected = {tensor.name: tensor for tensor in self.tensors}
        for tensor in self.tensors:
            if tensor.name not in tensors:
                raise PlanError(f"the plan of {self.model!r} has a tensor {tensor.name!r}, the model has none")
        for name, (shape, dtype) in tensors.items():
            if name not in expected:
                raise PlanError(f"the model has a tensor {name!r}, the plan of {self.model!r} has none")
            if tuple(shape) != expected[name].shape:
                raise PlanError(f"{name!r} has shape {tuple(shape)}, in the plan {expected[name].shape}")
            if dtype.removeprefix("torch.") != expected[name].dtype:
                raise PlanError(f"{name!r} is {dtype.removeprefix('torch.')}, in the plan {expected[name].dtype}")
        if world != self.cluster.world:
            raise PlanError(f"the job has {world} ranks, the plan is for {self.cluster.world}")
        if ranks_per_node is not None and ranks_per_node != self.cluster.ranks_per_node:
            raise PlanError(f"a node has {ranks_per_node} ranks, in the plan {self.cluster.ranks_per_node}")
        if ranks_per_node is None:
            for group in self.groups:
                if group.chain and tree.parse(group.chain).hierarchical and self.cluster.ranks_per_node > 1:
                    raise PlanError(
                        f"the chain {group.chain!r} needs nodes, and it is not known which rank is on which"
                    )
