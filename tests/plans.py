"""Plans made by hand, for tests that execute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.planner.plan import VERSION, Plan, PlanGroup, PlanTensor
from thinwire.planner.profile import Cluster


def plan_of(
    shapes: Mapping[str, Sequence[int]],
    groups: Sequence[tuple[Sequence[str], str]],
    ranks: int,
    each: int = 1,
    dtype: str = "float32",
) -> Plan:
    """Each group is given as its names and `"CODEC"` or `"CODEC via CHAIN"`."""
    made = []
    for names, text in groups:
        codec, _, chain = text.partition(" via ")
        made.append(PlanGroup(tuple(names), codec, chain))
    tensors = tuple(PlanTensor(name, tuple(shape), dtype) for name, shape in shapes.items())
    cluster = Cluster(nodes=ranks // each, ranks_per_node=each)
    plan = Plan(VERSION, "0" * 16, "by hand", cluster, "fast", "none", 0.0, 0.0, 0.0, tensors, tuple(made))
    plan.validate()
    return plan
