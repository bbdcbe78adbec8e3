"""A measured job, moved to another cluster."""

import pytest

from tests.planner import examples
from thinwire.errors import PlanError
from thinwire.planner.profile import Cluster
from thinwire.planner.search import choose
from thinwire.planner.what_if import on_cluster


def test_the_same_cluster_changes_nothing_that_was_measured_by_formula():
    profile = examples.profile()
    moved = on_cluster(profile, 2, 1e9 / 8)
    assert moved.tensors == profile.tensors
    assert moved.codecs == profile.codecs
    for old, new in zip(profile.links, moved.links, strict=True):
        assert new.line.slope == pytest.approx(old.line.slope)
        assert new.line.start == pytest.approx(old.line.start)


def test_more_ranks():
    moved = on_cluster(examples.profile(), 8, 1e9 / 8)
    moved.check()
    reduce, gather, _ = moved.links
    assert reduce.line.slope == pytest.approx(2 * 7 / 8 * 8e-9)
    assert gather.line.slope == pytest.approx(7 * 8e-9)
    assert gather.line.start == pytest.approx(7 * 0.0008)
    micro = moved.codecs[3]
    assert micro.rounds[0].bytes.slope == pytest.approx(0.006 / 4)
    assert micro.rounds[1].bytes.slope == pytest.approx(0.04)
    assert moved.codecs[2].rounds[1].bytes.slope == pytest.approx(0.5 / 4)


def test_slower_links_never_make_a_step_shorter():
    profile = examples.profile()
    seconds = [choose(on_cluster(profile, 4, rate), slack=0).predicted_seconds for rate in (1e6, 1e7, 1e8, 1e9)]
    assert seconds == sorted(seconds, reverse=True)


def test_one_node_is_left_alone():
    assert choose(on_cluster(examples.profile(), 1, 1e9)).predicted_seconds == pytest.approx(
        examples.profile().compute + 0.0002
    )


def test_refusals():
    with pytest.raises(PlanError, match="one rank per node"):
        on_cluster(examples.profile(cluster=Cluster(2, 2)), 4, 1e9)
    with pytest.raises(PlanError, match="measured with one rank"):
        on_cluster(examples.profile(cluster=Cluster(1, 1)), 4, 1e9)
