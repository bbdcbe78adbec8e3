"""The formulas of link bytes, against rings that are walked step by step."""

from __future__ import annotations

import pytest
import torch

from thinwire import traffic
from thinwire.comm.collectives import Collective


def _ring_all_gather(sizes: list[int]) -> int:
    """Bytes that each rank sends until all pieces have gone round."""
    ranks = len(sizes)
    sent = [sum(sizes[(rank - step) % ranks] for step in range(ranks - 1)) for rank in range(ranks)]
    return max(sent)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_formulas_are_those_of_a_ring(ranks: int) -> None:
    piece = 120
    assert traffic.all_gather(piece, ranks) == _ring_all_gather([piece] * ranks)
    # An all-reduce sends each piece round twice: to add it up, and to hand it out.
    assert traffic.all_reduce(piece * ranks, ranks) == 2 * _ring_all_gather([piece] * ranks)
    assert traffic.dense(30 * ranks, ranks) == traffic.all_reduce(120 * ranks, ranks)


@pytest.mark.parametrize("ranks", [2, 5])
def test_collectives_count_by_them(ranks: int) -> None:
    tensor = torch.zeros(50)
    assert Collective("gather", tensor).traffic(ranks) == traffic.all_gather(200, ranks)
    assert Collective("collect", tensor).traffic(ranks) == traffic.all_gather(200, ranks)
    for operation in ("sum", "average", "max"):
        assert Collective(operation, tensor).traffic(ranks) == traffic.dense(50, ranks)  # type: ignore[arg-type]
