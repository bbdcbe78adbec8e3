"""The searches against brute force, and their promises on real menus."""

import itertools
import random

import numpy as np
import pytest

from thinwire.errors import PlanError
from thinwire.planner import SEARCHES, pareto
from thinwire.planner.costs import GpuCodec
from thinwire.planner.network import NETWORKS, Network
from thinwire.planner.published import PublishedTensor
from thinwire.planner.simulation import Simulation

DGC = GpuCodec("dgc", "dgc(density=0.01)", 356e-6, 34e-6, 0.07, 0.08, 0.0, False, 8)
SIGN = GpuCodec("efsignsgd", "sign", 130e-6, 140e-6, 1.0, 0.125, 4.0, False, 8)
HALF = GpuCodec("fp16", "cast(dtype='fp16')", 4e-6, 22e-6, 1.0, 2.0, 0.0, True, 1)


def finish(steps) -> float:
    """The recurrence, written once more: steps of (compute, (lead, cpu, gpu, ser))."""
    g = c = p = 0.0
    for compute, (lead, cpu, gpu, ser) in steps:
        r = g + compute
        x = r + lead
        if cpu:
            x = p = max(p, x) + cpu
        c = max(c, x) + ser
        g = r + gpu
    return max(c, g)


def instance(generator: random.Random, most: int, cpu: bool):
    """Tensors with one way that does not compress and some that do, in whole milliseconds so that sums are exact."""
    compute, tables = [], []
    for _ in range(generator.randint(1, most)):
        compute.append(float(generator.randint(0, 20)))
        ways = [(0.0, 0.0, 0.0, float(generator.randint(1, 60)))]
        for _ in range(generator.randint(0, 3)):
            lead, rest, ser = (float(generator.randint(0, 15)) for _ in range(3))
            on_cpu = cpu and generator.random() < 0.5
            ways.append((0.0, 1 + lead, rest, ser) if on_cpu else (lead, 0.0, lead + rest, ser))
        tables.append(np.array(ways))
    return np.array(compute), tables


@pytest.mark.parametrize("cpu", [False, True])
def test_exact_is_brute_force_on_small_instances(cpu):
    generator = random.Random(8)
    for _ in range(250):
        compute, tables = instance(generator, 6, cpu)
        best = min(finish(zip(compute, ways, strict=True)) for ways in itertools.product(*tables))
        rows, offsets = np.concatenate(tables), np.cumsum([0, *map(len, tables)])
        found = pareto.solve(pareto.singles(compute, offsets, rows), beams=(1, 3))
        assert found.seconds == best
        assert finish((compute[start], rows[row]) for start, _, row in found.groups) == best
        assert not found.cut


def partitions(count):
    for cuts in itertools.product([False, True], repeat=count - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        yield list(itertools.pairwise(edges))


def test_joint_is_brute_force_over_all_groups():
    generator = random.Random(9)
    for _ in range(60):
        compute, tables = instance(generator, 4, cpu=True)
        count = len(compute)
        # A group costs three quarters of what its members cost one by one.
        ways = {
            (i, j): np.array([sum(parts) * (1.0 if j == i + 1 else 0.75) for parts in itertools.product(*tables[i:j])])
            for i in range(count)
            for j in range(i + 1, count + 1)
        }
        best = min(
            finish((compute[i:j].sum(), way) for (i, j), way in zip(groups, chosen, strict=True))
            for groups in partitions(count)
            for chosen in itertools.product(*(ways[group] for group in groups))
        )
        lengths = pareto.lengths_up_to(count)
        cells = [(j, int(k)) for j in range(count + 1) for k in lengths]
        parts = [ways[j - k, j] if k <= j else np.zeros((0, 4)) for j, k in cells]
        offsets = np.cumsum([0, *map(len, parts)])
        found = pareto.solve(pareto.Problem(compute, lengths, offsets, np.concatenate(parts)))
        assert found.seconds == pytest.approx(best, abs=1e-9)


def model(generator: random.Random, count: int) -> list[PublishedTensor]:
    return [
        PublishedTensor(f"t{i}", int(10 ** generator.uniform(2, 7.8)), round(generator.uniform(0, 4000)))
        for i in range(count)
    ]


def test_pruning_leaves_the_optimum_of_all_leaves():
    """Every pair of the 174 leaves, and every one of the 4341, against what is left of them."""
    generator = random.Random(10)
    for network, codec in itertools.product(NETWORKS.values(), (DGC, SIGN)):
        simulation = Simulation("two", model(generator, 2), [codec], network)
        vectors = simulation.menu.vectors(simulation.elements)
        one, two = vectors[:, None, 0], vectors[None, :, 1]
        r1 = simulation.compute[0]
        c1 = r1 + one[..., 0] + one[..., 3]
        r2 = r1 + one[..., 2] + simulation.compute[1]
        ends = np.maximum(np.maximum(c1, r2 + two[..., 0]) + two[..., 3], r2 + two[..., 2])
        assert simulation.search("exact").seconds == pytest.approx(ends.min(), rel=1e-12)
        simulation = Simulation("one", model(generator, 1), [codec], network, cpu=True)
        assert len(simulation.menu.options) == 4341
        vectors = simulation.menu.vectors(simulation.elements)[:, 0]
        ends = simulation.compute[0] + np.maximum(vectors[:, [0, 1, 3]].sum(axis=1), vectors[:, 2])
        assert simulation.search("exact").seconds == pytest.approx(ends.min(), rel=1e-12)


@pytest.mark.parametrize("cpu", [False, True])
def test_exact_is_never_above_espresso_and_joint_never_above_exact(cpu):
    generator = random.Random(11)
    for network, codec in itertools.product(NETWORKS.values(), (DGC, SIGN, HALF)):
        for count in (1, 2, 7, 40):
            simulation = Simulation("random", model(generator, count), [codec], network, cpu=cpu)
            seconds = {name: simulation.search(name).seconds for name in SEARCHES}
            for better, worse in [
                ("joint", "exact"),
                ("exact", "espresso"),
                ("exact", "myopic"),
                ("espresso", "fp32"),
            ]:
                assert seconds[better] <= seconds[worse] * (1 + 1e-12), (better, worse, count)
            assert seconds["joint"] >= simulation.bound


def test_what_is_said_of_a_plan_is_what_its_groups_take():
    simulation = Simulation("random", model(random.Random(12), 30), [DGC], NETWORKS["pcie-25g"])
    for name in SEARCHES:
        found = simulation.search(name)
        assert [start for start, _, _ in found.groups] == [0, *(stop for _, stop, _ in found.groups[:-1])]
        assert found.groups[-1][1] == 30
        operations = simulation.operations(found.groups)
        assert max(each[-1].end for each in operations) <= found.seconds * (1 + 1e-12)
        for group, spans in zip(found.groups, operations, strict=True):
            assert spans[0].start >= simulation.compute[: group[1]].sum() * (1 - 1e-12)
            for one, following in itertools.pairwise(spans):
                assert following.start >= one.end * (1 - 1e-12)


def test_espresso_strikes_out_what_stands_before_a_bubble():
    """The first tensor's exchange ends long before the second is ready: nothing would be gained, and nothing is tried."""
    tensors = [PublishedTensor("early", 4_000_000, 100.0), PublishedTensor("late", 4_000_000, 100_000.0)]
    simulation = Simulation("two", tensors, [DGC], NETWORKS["pcie-25g"])
    early, late = simulation.search("espresso").groups
    assert simulation.option(early[2]).codec is None
    assert simulation.option(late[2]).codec is DGC


def test_offloading_moves_codecs_to_the_processor():
    """GPU codecs delay the rest of backward, those on the processor do not."""
    tensors = [PublishedTensor(f"t{i}", 2_000_000, 1200.0) for i in range(10)]
    results = {}
    for cpu in (False, True):
        simulation = Simulation("ten", tensors, [DGC], NETWORKS["pcie-25g"], cpu=cpu)
        results[cpu] = simulation.search("espresso")
    assert results[True].seconds < results[False].seconds
    devices = [op.device for group in results[True].groups for op in simulation.option(group[2]).leaf.ops]
    assert "cpu" in devices


def test_nothing_is_compressed_for_nothing():
    """Backward is so slow that all exchanges hide behind it, but for the last one."""
    tensors = [PublishedTensor(f"t{i}", 1_000_000, 50_000.0) for i in range(6)]
    simulation = Simulation("slow", tensors, [DGC], NETWORKS["pcie-25g"])
    for name in ("espresso", "exact", "joint"):
        codecs = [simulation.option(option).codec for _, _, option in simulation.search(name).groups]
        assert codecs[:-1] == [None] * (len(codecs) - 1)
        assert codecs[-1] is DGC


def test_one_rank_has_nothing_to_exchange():
    simulation = Simulation("random", model(random.Random(13), 10), [DGC], Network(1, 1, 1e10, 1e9))
    for name in ("fp32", "espresso", "exact", "joint"):
        found = simulation.search(name)
        assert found.seconds == pytest.approx(simulation.bound)
        assert all(simulation.option(option).codec is None for _, _, option in found.groups)


def test_a_search_that_does_not_exist_is_named():
    with pytest.raises(PlanError, match="no search 'best'; known: fp32"):
        Simulation("random", model(random.Random(1), 1), [DGC], NETWORKS["pcie-25g"]).search("best")
