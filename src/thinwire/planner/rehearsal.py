"""Plans a made-up job, so that the kernels of planning are compiled."""

from __future__ import annotations

from .profile import VERSION, Cluster, CodecCost, Line, Link, Profile, Round, Tensor, fingerprint
from .replan import best_plan_fitted, ddp_plan


def rehearse() -> None:
    """As `auto` plans: two ranks, a dense exchange and one that sends less."""
    cluster = Cluster(nodes=2, ranks_per_node=1)
    tensors = tuple(
        Tensor(f"layer{i}", 100_000 * i, "dense", "float32", 0.01 * i, shape=(100_000 * i,)) for i in range(1, 5)
    )
    links = (
        Link("all_reduce", "flat", 2, Line(start=0.001, slope=1e-7)),
        Link("all_gather", "flat", 2, Line(start=0.001, slope=1e-7)),
    )
    sparse = (Round("all_gather", Line(slope=0.01), work=Line(slope=1e-10)), Round("all_reduce", Line(slope=0.04)))
    codecs = (
        CodecCost("dense", Line(), Line(), (Round("all_reduce", Line(slope=4.0)),), 0.0),
        CodecCost("micro(density=0.01)", Line(slope=1e-9), Line(slope=1e-9), sparse, 0.1),
    )
    profile = Profile(
        VERSION, fingerprint(tensors, cluster), "rehearsal", cluster, forward=0.02, backward=0.04, optimizer=0.01,
        tensors=tensors, links=links, codecs=codecs,
    )  # fmt: skip
    best_plan_fitted(profile, "high", [2, 4], 0.5)
    ddp_plan(profile, "high", 0.5, [2, 4])
