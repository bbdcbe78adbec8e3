"""A profile of a real job on real ranks: complete, the same everywhere, and good for plans and predictions."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.models import mlp, train, wrapped
from tests.ranks import run
from thinwire.auto.profiling import WATCHED, Profiling
from thinwire.errors import AttachError
from thinwire.planner.plan import PlanGroup
from thinwire.planner.predict import predict
from thinwire.planner.profile import Profile, Tensor
from thinwire.profiler.costs import pick

CODECS = ["dense", "cast", "int8", "micro(density=0.05)", "topk(density=0.1)"]


def _profile(candidates: list[str], budget: float) -> tuple[bytes, list[int]]:
    ddp = wrapped(mlp(0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    profiling = Profiling(ddp)
    train(ddp, optimizer, range(WATCHED))
    assert profiling.ready
    groups = len(dist.distributed_c10d._world.pg_names)
    found = profiling.measure(candidates=candidates, budget=budget, model="mlp")
    profiling.close()
    left = len(dist.distributed_c10d._world.pg_names) - groups
    train(ddp, optimizer, range(WATCHED, WATCHED + 2))  # the job goes on
    found.check()
    return msgspec.json.encode(found), [left, len(profiling.watch.gradients)]


def test_a_profile_of_two_ranks() -> None:
    (text, left), (other, _) = run(2, _profile, CODECS, 2.0)
    assert text == other
    assert left == [0, 0]  # no process group and no copy of a gradient stays
    profile = msgspec.json.decode(text, type=Profile)
    assert (profile.cluster.nodes, profile.cluster.ranks_per_node) == (1, 2)
    assert sum(tensor.elements for tensor in profile.tensors) == sum(p.numel() for p in mlp(0).parameters())
    assert all(tensor.energy > 0 for tensor in profile.tensors)
    assert {link.collective for link in profile.links} == {"all_gather", "all_reduce", "all_to_all"}
    assert all(link.line(1000) > 0 for link in profile.links)
    costs = {cost.codec: cost for cost in profile.codecs}
    assert list(costs) == CODECS
    assert costs["dense"].rounds[0].bytes(1000) == pytest.approx(4000, rel=0.01)
    assert costs["cast"].rounds[0].bytes(1000) == pytest.approx(2000, rel=0.01)
    assert [round_.collective for round_ in costs["int8"].rounds] == ["all_to_all", "all_gather"]
    assert [round_.collective for round_ in costs["micro(density=0.05)"].rounds] == ["all_gather", "all_reduce"]
    assert costs["dense"].loss == 0.0
    assert 0.0 < costs["cast"].loss < 0.01
    assert costs["cast"].loss < costs["micro(density=0.05)"].loss < 1.5
    names = tuple(tensor.name for tensor in profile.tensors)
    for codec in CODECS:
        assert predict(profile, [PlanGroup(names, codec)]).seconds > profile.compute


def test_one_rank_alone() -> None:
    ((text, _),) = run(1, _profile, ["dense", "topk(density=0.1)"], 1.0)
    profile = msgspec.json.decode(text, type=Profile)
    assert profile.links == ()
    assert [cost.rounds for cost in profile.codecs] == [(), ()]


def _refused() -> list[str]:
    ddp, found = wrapped(mlp(0)), []
    profiling = Profiling(ddp)
    for steps, candidates in ((0, ["dense"]), (WATCHED, ["dense", "zip"])):
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(steps))
        with pytest.raises(AttachError) as caught:
            profiling.measure(candidates=candidates, budget=0.5)
        found.append(str(caught.value))
    return found


def test_what_cannot_be_measured() -> None:
    for early, unknown in run(2, _refused):
        assert "no step was seen yet" in early
        assert "there is no codec 'zip'" in unknown


def test_groups_of_tensors_that_follow_each_other() -> None:
    tensors = [Tensor(str(i), n, "dense", "float32", 0.0, (n,)) for i, n in enumerate([2000] * 20 + [10] + [60_000])]
    groups = pick(tensors)
    assert [group.elements for group in groups] == [2000, 12_000, 60_000] or len(groups) >= 2
    for group in groups:
        numbers = [int(parameter.name) for parameter in group.parameters]
        assert numbers == sorted(numbers)
        assert 20 not in numbers  # small ones travel dense, whatever the codec
        assert group.parameters[-1].offset + group.parameters[-1].elements == group.elements
    assert [group.elements for group in pick([Tensor("a", 5000, "dense", "float32", 0.0, (5000,))])] == [5000]
    assert [group.elements for group in pick([Tensor("a", 5, "vector", "float32", 0.0, (5,))])] == [5]


def test_everything_of_a_candidate_is_known() -> None:
    from thinwire.profiler.measure import CANDIDATES, HIERARCHICAL

    for text in (*CANDIDATES, *HIERARCHICAL):
        thinwire.engine.strategy.Strategy.of(text)


def test_in_every_step_another_rank_may_be_the_slowest() -> None:
    from thinwire.profiler.measure import _lateness

    assert _lateness([(1.0, 3.0, 1.0, 3.0, 1.0), (3.0, 1.0, 3.0, 1.0, 1.0)]) == 3.0
    assert _lateness([(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)]) == 1.0
    assert _lateness([(), ()]) == 1.0
