"""A profile as a measurement on two CPU ranks might give it."""

from thinwire.planner.profile import (
    VERSION,
    Cluster,
    CodecCost,
    Contention,
    Line,
    Link,
    Profile,
    Round,
    Tensor,
    fingerprint,
)


def profile(sizes=(50_000, 1_000_000, 2_000_000, 4_000_000), bits_per_second=1e9, cluster=None) -> Profile:
    """Four tensors, 20 ms of backward apart, on a link of the given rate; every codec that the planner may choose from."""
    cluster = cluster or Cluster(nodes=2, ranks_per_node=1, rate="1gbit")
    tensors = tuple(
        Tensor(f"layer{i}", n, "dense", "float32", 0.02 * (i + 1), shape=(n,)) for i, n in enumerate(sizes)
    )
    byte = 8 / bits_per_second
    links = (
        Link("all_reduce", "flat", cluster.world, Line(start=0.001, slope=byte)),
        Link("all_gather", "flat", cluster.world, Line(start=0.0008, slope=byte)),
        Link("all_to_all", "flat", cluster.world, Line(start=0.0008, slope=byte / 2)),
    )
    codecs = (
        CodecCost("dense", Line(), Line(), (Round("all_reduce", Line(slope=4.0)),), 0.0),
        CodecCost("cast", Line(slope=0.3e-9), Line(slope=0.3e-9), (Round("all_reduce", Line(slope=2.0)),), 0.002),
        CodecCost(
            "int8",
            Line(slope=1.0e-9),
            Line(slope=0.5e-9),
            (Round("all_to_all", Line(slope=1.0), work=Line(slope=0.5e-9)), Round("all_gather", Line(slope=0.5))),
            0.01,
        ),
        CodecCost(
            "micro(density=0.01)",
            Line(floor=0.0002, slope=0.6e-9),
            Line(slope=0.2e-9),
            (
                Round("all_gather", Line(start=16, slope=0.006), work=Line(slope=0.1e-9)),
                Round("all_reduce", Line(slope=0.04)),
            ),
            0.3,
        ),
    )
    return Profile(
        VERSION,
        fingerprint(tensors, cluster),
        "example",
        cluster,
        forward=0.04,
        backward=tensors[-1].ready,
        optimizer=0.01,
        tensors=tensors,
        links=links,
        codecs=codecs,
        contention=Contention(codec=1.0, collective=0.1),
        group_overhead=0.0002,
    )
