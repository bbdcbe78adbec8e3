"""The model of the engine against steps worked out by hand, and laws that any step obeys."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import examples
from tests.support.profiles import tries
from thinwire.errors import PlanError
from thinwire.planner.plan import PlanGroup
from thinwire.planner.predict import predict
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


def small(codec=0.0, collective=0.0, overhead=0.0, world=2, latency=0.0) -> Profile:
    """Tensors of 1 and 2 elements, ready after 1 and 2 s; a byte takes 1 s; `topk` halves, `micro` has two rounds."""
    cluster = Cluster(world, 1)
    tensors = (Tensor("a", 1, "dense", "float32", 1.0), Tensor("b", 2, "dense", "float32", 2.0))
    gather = Link("all_gather", "flat", world, Line(start=latency, slope=1.0))
    reduce = Link("all_reduce", "flat", world, Line(start=latency, slope=1.0))
    return Profile(
        VERSION,
        fingerprint(tensors, cluster),
        "small",
        cluster,
        forward=10.0,
        backward=2.0,
        optimizer=5.0,
        tensors=tensors,
        links=(gather, reduce) if world > 1 else (),
        codecs=(
            CodecCost("dense", Line(), Line(), (Round("all_reduce", Line(slope=4.0)),), 0.0),
            CodecCost("topk", Line(slope=0.5), Line(slope=0.25), (Round("all_gather", Line(slope=1.0)),), 0.5),
            CodecCost(
                "micro",
                Line(slope=0.5),
                Line(slope=0.25),
                (
                    Round("all_gather", Line(slope=0.25), work=Line(slope=0.5)),
                    Round("all_reduce", Line(slope=0.5)),
                ),
                0.5,
            ),
        ),
        contention=Contention(codec, collective),
        group_overhead=overhead,
    )


def groups(*each):
    return [PlanGroup(tuple(names), codec) for names, codec in each]


def spans(profile, *each):
    return [
        [(o.name.split()[0], o.start, o.end) for o in group] for group in predict(profile, groups(*each)).operations
    ]


def test_dense_groups_follow_each_other_on_the_wire():
    both = [("a", "dense"), ("b", "dense")]
    assert spans(small(), *both)[0][1] == ("all_reduce", 1.0, 5.0)
    assert spans(small(), *both)[1][1] == ("all_reduce", 5.0, 13.0)
    assert predict(small(), groups(*both)).seconds == 10 + 13 + 5
    assert predict(small(), groups(("ab", "dense"))).seconds == 10 + 2 + 12 + 5


def test_latency_of_one_passes_beside_the_next():
    found = spans(small(latency=3.0), ("a", "dense"), ("b", "dense"))
    assert found[0][1] == ("all_reduce", 1.0, 8.0)
    assert found[1][1] == ("all_reduce", 5.0, 16.0)


def test_work_shares_the_core_with_backward():
    free = predict(small(), groups(("a", "topk"), ("b", "topk")))
    assert free.backward == 2.0
    assert free.operations[0][0].end == 1.5
    # With all of it added, half a second of encoding takes one, and so does the half second of backward beside it.
    shared = predict(small(codec=1.0), groups(("a", "topk"), ("b", "topk")))
    assert shared.operations[0][0].end == 2.0
    assert shared.backward == 2.5


def test_a_collective_slows_backward():
    found = predict(small(collective=0.5), groups(("a", "dense"), ("b", "dense")))
    assert found.backward == 3.0  # the second half of backward at half its speed
    assert found.operations[1][1].start == 5.0


def test_a_further_round_goes_before_the_next_group():
    found = spans(small(), ("a", "micro"), ("b", "micro"))
    assert found[0][:3] == [("encode", 1.0, 1.5), ("all_gather", 1.5, 1.75), ("work", 1.75, 2.25)]
    # b is ready at 2.0 while the thread works for a: it waits, and a's decode waits for b's encode.
    assert found[1][0] == ("encode", 2.25, 3.25)
    assert found[0][3] == ("all_reduce", 2.25, 2.75)
    assert found[0][4] == ("decode", 3.25, 3.5)
    assert found[1][1:] == [
        ("all_gather", 3.25, 3.75),
        ("work", 3.75, 4.75),
        ("all_reduce", 4.75, 5.75),
        ("decode", 5.75, 6.25),
    ]


def test_each_group_costs_its_overhead():
    assert predict(small(overhead=0.25), groups(("ab", "dense"))).seconds == 10 + 2 + 0.25 + 12 + 5


def test_one_rank_exchanges_nothing():
    found = predict(small(world=1), groups(("a", "dense"), ("b", "dense")))
    assert found.seconds == 17.0


def test_what_the_profile_does_not_know_is_named():
    with pytest.raises(PlanError, match="no tensor 'z'"):
        predict(small(), groups(("z", "dense")))
    with pytest.raises(PlanError, match=r"no costs of 'sign'; it has: dense, topk, micro"):
        predict(small(), groups(("ab", "sign")))


@settings(max_examples=tries(150))
@given(
    sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8),
    cuts=st.integers(0, 2**8 - 1),
    codecs=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    contention=st.tuples(st.floats(0, 1), st.floats(0, 0.9)),
)
def test_laws_of_every_step(sizes, cuts, codecs, contention):
    profile = msgspec.structs.replace(examples.profile(sizes), contention=Contention(*contention))
    plan, names = [], []
    for index, tensor in enumerate(profile.tensors):
        names.append(tensor.name)
        if cuts >> index & 1 or index + 1 == len(sizes):
            plan.append(PlanGroup(tuple(names), profile.codecs[codecs[len(plan)]].codec))
            names = []
    found = predict(profile, plan)
    ready = {tensor.name: tensor.ready for tensor in profile.tensors}
    assert found.seconds >= profile.compute - 1e-9
    for group, operations in zip(plan, found.operations, strict=True):
        assert operations[0].start >= ready[group.names[-1]] - 1e-9
        for one, following in itertools.pairwise(operations):
            assert one.start <= one.end <= following.start + 1e-12
        assert operations[-1].end <= found.exchange + 1e-12
    work = sorted((o.start, o.end) for operations in found.operations for o in operations if o.lane == "codec")
    for (_, end), (start, _) in itertools.pairwise(work):
        assert end <= start + 1e-12  # one thread
    assert found.backward >= profile.backward - 1e-9
    if contention == (0, 0):
        assert found.backward == pytest.approx(profile.backward)
