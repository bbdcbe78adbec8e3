"""The collectives, in memory and on gloo."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.ranks import run
from tests.support.limits import CEILING
from thinwire.comm.collectives import DUPLEX_BYTES, Collective, Operation
from thinwire.comm.world import LocalWorld, TorchWorld


def _parts(operation: Operation, tensors: list[torch.Tensor]) -> list[Collective]:
    size = len(tensors)
    return [
        Collective(operation, tensor, torch.zeros(size * tensor.numel(), dtype=tensor.dtype) if operation == "gather" else None)
        for tensor in tensors
    ]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 5])
def test_local_gather(size: int) -> None:
    parts = _parts("gather", [torch.full((3,), rank, dtype=torch.uint8) for rank in range(size)])
    pending = LocalWorld(size).issue(0, parts, lambda: None)
    assert pending.done()
    pending.check()
    for part in parts:
        assert part.output is not None
        assert part.output.tolist() == [rank for rank in range(size) for _ in range(3)]


@pytest.mark.parametrize(
    ("operation", "expected"), [("sum", [9.0, -3.0]), ("average", [3.0, -1.0]), ("max", [6.0, 1.0])]
)
def test_local_reductions(operation: Operation, expected: list[float]) -> None:
    parts = _parts(operation, [torch.tensor([1.0, -4.0]), torch.tensor([2.0, 0.0]), torch.tensor([6.0, 1.0])])
    LocalWorld(3).issue(0, parts, lambda: None).check()
    for part in parts:
        assert part.tensor.tolist() == expected


def test_local_sums_go_by_rank() -> None:
    tensors = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    LocalWorld(3).issue(0, _parts("sum", tensors), lambda: None)
    assert [float(tensor) for tensor in tensors] == [1.0] * 3
    tensors = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    LocalWorld(3).issue(0, _parts("sum", tensors), lambda: None)
    assert [float(tensor) for tensor in tensors] == [0.0] * 3


def test_local_ranks_that_disagree() -> None:
    world = LocalWorld(2)
    with pytest.raises(ValueError, match="disagree in round 1"):
        world.issue(0, _parts("sum", [torch.zeros(2), torch.zeros(3)]), lambda: None)
    with pytest.raises(ValueError, match="disagree in round 2"):
        world.issue(1, [*_parts("sum", [torch.zeros(2)]), *_parts("max", [torch.zeros(2)])], lambda: None)
    with pytest.raises(ValueError, match="disagree"):
        world.issue(0, _parts("sum", [torch.zeros(2)]), lambda: None)
    with pytest.raises(ValueError, match="at least one rank"):
        LocalWorld(0)


def _collectives() -> dict[str, list[float]]:
    """All operations on two rounds at once; the second round is issued in the other order on odd ranks."""
    import threading

    rank, size = dist.get_rank(), dist.get_world_size()
    world = TorchWorld(None, 2)
    assert (world.size, list(world.local_ranks)) == (size, [rank])
    results: dict[str, list[float]] = {}
    woken = threading.Semaphore(0)
    for dtype in (torch.float32, torch.bfloat16):
        for operation in ("sum", "average", "max"):
            tensors = [torch.tensor([rank + 1.0, -2.0 * rank], dtype=dtype) for _ in range(2)]
            rounds = (0, 1) if rank % 2 else (1, 0)
            pending = [world.issue(i, [Collective(operation, tensors[i])], woken.release) for i in rounds]
            for _ in pending:
                assert woken.acquire(timeout=CEILING)
            for one in pending:
                assert one.done()
                one.check()
            assert torch.equal(tensors[0], tensors[1])
            results[f"{operation} {dtype}"] = tensors[0].tolist()
    output = torch.zeros(2 * size, dtype=torch.uint8)
    world.issue(0, [Collective("gather", torch.tensor([rank, 7], dtype=torch.uint8), output)], woken.release)
    assert woken.acquire(timeout=CEILING)
    results["gather"] = output.tolist()
    world.close()
    assert world.groups == []
    world.close()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_on_gloo(size: int) -> None:
    total = size * (size + 1) / 2
    for results in run(size, _collectives):
        for dtype in ("torch.float32", "torch.bfloat16"):
            assert results[f"sum {dtype}"] == [total, -2 * (total - size)]
            assert results[f"average {dtype}"] == [total / size, -2 * (total - size) / size]
            assert results[f"max {dtype}"] == [size, 0.0]
        assert results["gather"] == [0, 7, 1, 7, 2, 7][: 2 * size]


OPERATIONS: tuple[Operation, ...] = ("gather", "all to all", "sum", "average")
SIZES = [0, 1, 999, DUPLEX_BYTES // 4 - 1, DUPLEX_BYTES // 4, DUPLEX_BYTES]


def _part(operation: Operation, elements: int, rank: int, world: int) -> Collective:
    """Whole numbers, so that sums are the same in any order."""
    dice = torch.Generator().manual_seed(1000 * elements + rank)
    many = elements * world if operation == "all to all" else elements
    tensor = torch.randint(-99, 100, (many,), generator=dice).float()
    return Collective(operation, tensor, torch.zeros(elements * world) if operation in OPERATIONS[:2] else None)


def _hurried() -> list[bool]:
    """Messages of all sizes, several under way at once, and one rank comes late each time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world, same = TorchWorld(None, 1), []
    for number, operation in enumerate(OPERATIONS):
        parts = [_part(operation, elements, rank, size) for elements in SIZES]
        dist.barrier()
        time.sleep(0.02 * (rank == number % size))
        ends = [threading.Event() for _ in parts]
        under_way = [world.issue(0, [part], end.set) for part, end in zip(parts, ends, strict=True)]
        for pending, end in zip(under_way, ends, strict=True):
            end.wait()
            assert pending.done(), "woken when all of it has ended"
            pending.check()
        for elements, part in zip(SIZES, parts, strict=True):
            expected = [_part(operation, elements, other, size) for other in range(size)]
            LocalWorld(size).issue(0, expected, lambda: None)
            outputs = [one.tensor if one.output is None else one.output for one in (part, expected[rank])]
            same.append(torch.equal(*outputs))
    dist.barrier()
    world.close()
    return same


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_all_sizes_are_as_in_memory(size: int) -> None:
    for same in run(size, _hurried):
        assert same == [True] * len(OPERATIONS) * len(SIZES)


def _beside(operation: Operation) -> list[list[float]]:
    """Sums of two dtypes at once, of sizes that leave the second rank's numbers at odd places."""
    rank, world = dist.get_rank(), TorchWorld(None, 1)
    found = []
    for count in (0, 1, 5):
        values = torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
        beside = torch.tensor([rank + 0.1, 2.0**-20, -rank])
        pending = world.issue(0, [Collective(operation, values, beside=beside)], lambda: None)
        pending.check()
        found.append([*values.tolist(), *beside.tolist()])
    world.close()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("operation", ["sum", "average"])
def test_a_sum_beside_another(size: int, operation: Operation) -> None:
    parts = [
        Collective(
            operation,
            torch.full((5,), rank + 1.0, dtype=torch.bfloat16),
            beside=torch.tensor([rank + 0.1, 2.0**-20, -rank]),
        )
        for rank in range(size)
    ]
    LocalWorld(size).issue(0, parts, lambda: None)
    assert parts[0].bytes == 22
    expected = [*parts[0].tensor.tolist(), *parts[0].tensors[0].tolist()]
    for results in run(size, _beside, operation):
        for count, result in zip((0, 1, 5), results, strict=True):
            assert result == pytest.approx(expected[5 - count :])


def _sums_of_two() -> list[float]:
    """Several on their way at once, of growing and shrinking sizes: each has a buffer of its own."""
    world = TorchWorld(None, 1)
    sizes = [(1000,), (0,), (5,), (700, 100), (200,), (10, 20, 5), (3 << 20,)]
    tensors = [torch.full(size, float(dist.get_rank() + i)) for i, size in enumerate(sizes)]
    for _ in range(2):
        pending = [world.issue(0, [Collective("average", tensor)], lambda: None) for tensor in tensors]
        for one in pending:
            one.check()
            one.check()  # a second look changes nothing, and gives no buffer back twice
    world.close()
    assert all(bool((tensor == tensor.view(-1)[:1]).all()) for tensor in tensors)
    return [float(tensor.view(-1)[0]) for tensor in tensors if tensor.numel()]


def test_sums_of_two_ranks() -> None:
    """Small ones travel by an all-gather, the last one does not."""
    assert run(2, _sums_of_two) == [[0.5, 2.5, 3.5, 4.5, 5.5, 6.5]] * 2


def _policies(patient: str) -> tuple[bool, set[int], int]:
    """Whether the threads that were there are scheduled as before; how those of a world are, and the one that made it."""
    os.environ["THINWIRE_PATIENT"] = patient  # of a process that is kept for other tests

    def now() -> dict[str, int]:
        found = {}
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                found[thread] = os.sched_getscheduler(int(thread))
        return found

    before = now()
    world = TorchWorld(None, 2)
    after = now()
    dist.barrier()  # the other rank may still be connecting
    world.close()
    del os.environ["THINWIRE_PATIENT"]
    added = {policy for thread, policy in after.items() if thread not in before}
    kept = all(after.get(thread, policy) == policy for thread, policy in before.items())
    return kept, added, os.sched_getscheduler(0)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_threads_of_a_world_do_not_interrupt_others() -> None:
    assert run(2, _policies, "1") == [(True, {os.SCHED_BATCH}, os.SCHED_OTHER)] * 2
    assert run(2, _policies, "0") == [(True, {os.SCHED_OTHER}, os.SCHED_OTHER)] * 2


def _mean(group: dist.ProcessGroup | None, rank: float, codec: str = "topk(density=1.0)") -> float:
    exchange = thinwire.Exchange({"a": torch.empty(2000)}, codec, group)
    tensors = {"a": torch.full((2000,), float(rank))}
    exchange.reduce_(tensors)
    exchange.close()
    return float(tensors["a"].mean())


def _again_and_again() -> tuple[list[float], list[float]]:
    """Exchanges one after the other, each closed: on all ranks, and on groups that only some ranks are in."""
    rank = dist.get_rank()
    whole = [_mean(None, rank) for _ in range(3)]
    # Rank 1 is in both groups, so that the ranks of one have different numbers of groups.
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    members = [(0, 1), (1, 2)]
    parts = [_mean(pair, rank) for _ in range(3) for pair, ranks in zip(pairs, members, strict=True) if rank in ranks]
    parts += [_mean(None, rank)]
    parts += [_mean(pair, rank, "micro") for pair, ranks in zip(pairs, members, strict=True) if rank in ranks]
    # Every rank a node of its own: groups inside a group.
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    for text in ("topk(density=1.0) via B", "topk(density=1.0) via K"):
        parts += [_mean(pair, rank, text) for pair, ranks in zip(pairs, members, strict=True) if rank in ranks]
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return whole, parts


def test_exchanges_after_closed_ones() -> None:
    results = run(3, _again_and_again)
    assert [whole for whole, _ in results] == [[1.0] * 3] * 3
    assert results[0][1] == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5]
    assert results[1][1] == [0.5, 1.5] * 3 + [1.0, 0.5, 1.5] + [0.5, 1.5] * 2
    assert results[2][1] == [1.5, 1.5, 1.5, 1.0, 1.5, 1.5, 1.5]
