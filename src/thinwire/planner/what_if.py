"""Profiles of a measured job extrapolated to another cluster: other links, another number of ranks.

Measurements that do not depend on the cluster are kept: backward, codec work on a rank's own gradient, latency per round. Links
follow their formulas at the new rate. Costs that depend on the number of ranks n are scaled: decoding of n gathered messages;
MiCRO's indices and the second half of int8, of which every rank sends one n-th.
"""

import msgspec

from ..codecs import parse
from ..codecs.int8 import Int8
from ..codecs.micro import MiCRO
from ..errors import PlanError
from .profile import Cluster, CodecCost, Line, Link, Profile, fingerprint


def on_cluster(profile: Profile, nodes: int, bytes_per_second: float) -> Profile:
    """The expected profile with `nodes` nodes of one rank each, joined by links of this rate."""
    before = profile.cluster
    if before.ranks_per_node != 1:
        raise PlanError("only profiles with one rank per node can be extrapolated to another cluster")
    if before.world < 2:
        raise PlanError(
            "this profile was measured with one rank: it has no links and no decoding costs for several ranks"
        )
    if nodes < 1:
        raise PlanError(f"a cluster has at least one node, not {nodes}")
    cluster = Cluster(nodes, 1, before.backend, f"{8e-6 * bytes_per_second:g}mbit", before.device)
    links = tuple(
        Link(link.collective, link.scope, nodes, _line(link, nodes, bytes_per_second)) for link in profile.links
    )
    codecs = tuple(_cost(cost, before.world, nodes) for cost in profile.codecs)
    remark = (
        f"measured with {before.world} ranks at {before.rate or 'an unknown rate'}, moved to {nodes} at {cluster.rate}"
    )
    return msgspec.structs.replace(
        profile,
        cluster=cluster,
        fingerprint=fingerprint(profile.tensors, cluster),
        links=links if nodes > 1 else (),
        codecs=codecs,
        native_seconds=0.0,
        remarks=(*profile.remarks, remark),
    )


def _line(link: Link, nodes: int, rate: float) -> Line:
    share = {
        "all_reduce": 2.0 * (nodes - 1) / nodes,
        "reduce_scatter": (nodes - 1) / nodes,
        "all_to_all": (nodes - 1) / nodes,
        "reduce": 1.0,
        "broadcast": 1.0,
    }.get(link.collective, nodes - 1.0)
    grown = (nodes - 1) / max(link.ranks - 1, 1)
    # The floor is latency too, of messages too small for the rate to matter.
    return Line(link.line.floor * grown, max(link.line.start, 0.0) * grown, share / rate, link.line.error)


def _cost(cost: CodecCost, before: int, after: int) -> CodecCost:
    codec, ratio = parse(cost.codec), after / before
    collectives = [round_.collective for round_ in cost.rounds]
    rounds, decode = cost.rounds, cost.decode
    if isinstance(codec, MiCRO) or (isinstance(codec, Int8) and "all_to_all" in collectives):
        rounds = tuple(
            msgspec.structs.replace(round_, bytes=_times(round_.bytes, 1 / ratio))
            if round_.collective == "all_gather"
            else round_
            for round_ in rounds
        )
    elif set(collectives) == {"all_gather"}:
        decode = _times(decode, ratio)
    return msgspec.structs.replace(cost, rounds=rounds, decode=decode)


def _times(line: Line, factor: float) -> Line:
    return Line(line.floor * factor, line.start * factor, line.slope * factor, line.error)
