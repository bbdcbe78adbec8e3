"""Plans of measured jobs: against all plans of small ones, and the promises of quality and slack."""

import itertools
import random

import msgspec
import pytest

from tests.planner import examples
from thinwire.errors import PlanError
from thinwire.planner.plan import PlanGroup
from thinwire.planner.predict import predict
from thinwire.planner.profile import Cluster, Contention, fingerprint
from thinwire.planner.search import SLACK, as_ddp, by_buckets, choose


def every_plan(profile):
    """Seconds and loss of all ways to group and compress."""
    count, weight = len(profile.tensors), sum(tensor.elements for tensor in profile.tensors)
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        runs = [profile.tensors[a:b] for a, b in itertools.pairwise(edges)]
        for codecs in itertools.product(profile.codecs, repeat=len(runs)):
            groups = [
                PlanGroup(tuple(t.name for t in run), cost.codec) for run, cost in zip(runs, codecs, strict=True)
            ]
            lost = sum(cost.loss * t.elements for run, cost in zip(runs, codecs, strict=True) for t in run)
            yield predict(profile, groups).seconds, lost / weight


def test_small_jobs_get_the_best_plan():
    generator = random.Random(3)
    for _ in range(12):
        sizes = [int(10 ** generator.uniform(4, 7)) for _ in range(3)]
        profile = examples.profile(sizes, bits_per_second=10 ** generator.uniform(8, 10))
        contention = Contention(generator.random(), 0.5 * generator.random())
        profile = msgspec.structs.replace(profile, contention=contention)
        plans = list(every_plan(profile))
        fastest = min(seconds for seconds, _ in plans)
        assert choose(profile, slack=0.0).predicted_seconds == pytest.approx(fastest, rel=1e-5)
        least = min(loss for seconds, loss in plans if seconds <= fastest * (1 + SLACK))
        chosen = choose(profile)
        assert chosen.predicted_seconds <= fastest * (1 + SLACK) * (1 + 1e-5)
        assert chosen.loss <= least + 0.01  # by steps of one change; what loses least may be two changes away


def test_a_plan_says_what_predict_says():
    profile = examples.profile()
    plan = choose(profile)
    assert plan.predicted_seconds == predict(profile, plan.groups).seconds
    assert plan.bound_seconds == profile.compute <= plan.predicted_seconds <= plan.dense_seconds
    plan.validate()
    plan.check({t.name: (t.shape, t.dtype) for t in profile.tensors}, profile.cluster.world)
    for group, operations in zip(plan.groups, predict(profile, plan.groups).operations, strict=True):
        assert group.operations == operations


def test_on_a_fast_link_nothing_is_compressed():
    plan = choose(examples.profile(bits_per_second=1e12))
    assert {group.codec for group in plan.groups} == {"dense"}
    assert plan.loss == 0
    assert "nothing is compressed" in plan.remarks[0]


def test_quality_bounds_what_is_chosen():
    slow = examples.profile(bits_per_second=1e7)
    costs = tuple(msgspec.structs.replace(c, loss=0.99) if "micro" in c.codec else c for c in slow.codecs)
    slow = msgspec.structs.replace(slow, codecs=costs)
    codecs = {
        quality: {g.codec for g in choose(slow, quality=quality).groups} for quality in ("lossless", "high", "fast")
    }
    assert codecs["lossless"] == {"dense"}
    assert codecs["high"] <= {"dense", "cast", "int8"}
    assert "int8" in codecs["high"]
    assert "micro(density=0.01)" in codecs["fast"]


def test_energy_weighs_the_loss():
    """The tensor that carries nearly all of the gradient is spared, though it is no larger than the other."""
    profile = examples.profile((1_000_000, 1_000_000), bits_per_second=2e8)
    tensors = tuple(msgspec.structs.replace(t, energy=e) for t, e in zip(profile.tensors, (999.0, 1.0), strict=True))
    plan = choose(msgspec.structs.replace(profile, tensors=tensors), slack=0.3)
    loss = {c.codec: c.loss for c in profile.codecs}
    lost = [loss[group.codec] for group in plan.groups for _ in group.names]
    assert lost[0] < lost[1]
    assert plan.loss == pytest.approx(0.999 * lost[0] + 0.001 * lost[1])


def test_one_tensor_and_one_rank():
    plan = choose(examples.profile((5_000_000,), bits_per_second=1e8))
    assert [group.names for group in plan.groups] == [("layer0",)]
    profile = examples.profile()
    cluster = Cluster(1, 1)
    alone = msgspec.structs.replace(
        profile, cluster=cluster, links=(), fingerprint=fingerprint(profile.tensors, cluster)
    )
    alone.check()
    plan = choose(alone)
    assert plan.remarks == ("one rank: there is nothing to exchange",)
    assert len(plan.groups) == 1
    assert plan.groups[0].codec == "dense"


@pytest.mark.parametrize(
    ("options", "message"), [({"quality": "good"}, "lossless, high, fast"), ({"slack": -1}, "slack")]
)
def test_wrong_wishes_are_named(options, message):
    with pytest.raises(PlanError, match=message):
        choose(examples.profile(), **options)


def test_groups_end_where_buckets_do():
    profile = examples.profile([100_000] * 12, bits_per_second=1e8)
    names = [tensor.name for tensor in profile.tensors]
    for borders in ([4, 8, 12], [1, 12], [12], [3, 7, 8, 12]):
        edges = [0, *borders]
        held = by_buckets(profile, borders)
        for start, stop in itertools.pairwise(edges):
            ready = {tensor.ready for tensor in held.tensors[start:stop]}
            assert ready == {profile.tensors[stop - 1].ready}
        plan = choose(held, borders=borders)
        for group in plan.groups:
            first, last = names.index(group.names[0]), names.index(group.names[-1])
            assert any(start <= first and last < stop for start, stop in itertools.pairwise(edges)), borders
        ddp = as_ddp(held, borders=borders)
        assert [len(group.names) for group in ddp] == [stop - start for start, stop in itertools.pairwise(edges)]
        assert plan.predicted_seconds <= predict(held, ddp).seconds * (1 + SLACK)
