"""The search for leaks sees what a cluster is made of, as long as there is one."""

from __future__ import annotations

from tests import leaks
from tests.lab.conftest import any_mode, needs_namespaces
from thinwire.lab import Cluster
from thinwire.lab.netns import list_namespaces


@needs_namespaces
def test_a_cluster_that_is_left_is_named() -> None:
    with Cluster(2, rate="none", mode=any_mode()) as cluster:
        left = leaks._left_of_clusters()
        here = [name for name in list_namespaces() if name.split("-")[0] == cluster.id]
        assert here, "a cluster has namespaces"
        assert {f"namespace {name}" for name in here} <= set(left)
        assert any(line.startswith("/") for line in left), "and files"
    assert leaks._left_of_clusters() == []
