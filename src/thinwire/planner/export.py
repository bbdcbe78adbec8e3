"""Writes the result of a search on published GPU costs as a plan."""

from ..errors import PlanError
from .plan import VERSION, Plan, PlanGroup, PlanTensor
from .profile import Cluster, Tensor, fingerprint
from .simulation import Outcome, Simulation


def to_plan(simulation: Simulation, found: Outcome, dense_seconds: float) -> Plan:
    """The plan with thinwire's codecs and chains; the paper's random_k and onebit have no equivalent."""
    cluster = Cluster(simulation.network.nodes, simulation.network.gpus, "nccl", str(simulation.network), "cuda")
    groups = []
    for group, operations in zip(found.groups, simulation.operations(found.groups), strict=True):
        start, stop, number = group
        option = simulation.option(number)
        if option.codec is not None and not option.codec.codec:
            raise PlanError(
                f"a plan with {option.codec.name!r} cannot be run: thinwire has no codec that is exchanged like the paper's "
                f"(randomk sums its values instead)"
            )
        names = tuple(tensor.name for tensor in simulation.tensors[start:stop])
        codec = option.codec.codec if option.codec is not None else "dense"
        groups.append(PlanGroup(names, codec, str(option.leaf), operations))
    tensors = [Tensor(t.name, t.elements, "", "float32", 0.0) for t in simulation.tensors]
    return Plan(
        version=VERSION,
        fingerprint=fingerprint(tensors, cluster),
        model=simulation.model,
        cluster=cluster,
        quality="fast",
        search=found.search,
        predicted_seconds=found.seconds,
        bound_seconds=simulation.bound,
        dense_seconds=dense_seconds,
        tensors=tuple(PlanTensor(t.name, (t.elements,), "float32") for t in simulation.tensors),
        groups=tuple(groups),
        search_seconds=found.search_seconds,
        remarks=("from published times of one V100; nothing of it was measured by thinwire",),
    )
