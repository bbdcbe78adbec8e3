"""What ranks tell each other outside of steps."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run
from thinwire.comm import object_collectives
from thinwire.engine.consensus import agree
from thinwire.errors import AttachError, ExchangeError


def _tell() -> list[object]:
    rank = dist.get_rank()
    return object_collectives.gather({"rank": rank, "list": [0.5] * rank, "text": "é" * 100 * rank}, None)


def test_everybody_hears_everybody() -> None:
    expected = [{"rank": rank, "list": [0.5] * rank, "text": "é" * 100 * rank} for rank in range(3)]
    assert run(3, _tell) == [expected] * 3


def _garbage(content: bytes) -> str:
    if dist.get_rank() == 0:
        with pytest.raises(ExchangeError) as caught:
            object_collectives.gather("hello", None)
        return str(caught.value)
    size = torch.tensor([len(content)])
    sizes, padded = torch.empty(2, dtype=torch.int64), torch.zeros(max(len(content), 7), dtype=torch.uint8)
    dist.all_gather_single(sizes, size)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.all_gather_single(torch.empty(2 * padded.numel(), dtype=torch.uint8), padded)
    return ""


def _of_the_first() -> dict[str, tuple[int, float]]:
    rank = dist.get_rank()
    return object_collectives.broadcast({"rank": (rank, 0.1)}, dict[str, tuple[int, float]], None)


def test_the_value_of_rank_0_is_that_of_all_ranks() -> None:
    assert run(3, _of_the_first) == [{"rank": (0, 0.1)}] * 3


@pytest.mark.parametrize("content", [b"\x80\x04\x95 a pickle", b"[" * 100_000, b"\xff\xfe"])
def test_words_that_cannot_be_read(content: bytes) -> None:
    assert "rank 1 sent words that cannot be read" in run(2, _garbage, content)[0]


def _boast(size: int) -> str:
    if dist.get_rank():
        dist.all_gather_single(torch.empty(2, dtype=torch.int64), torch.tensor([size]))
        return ""
    with pytest.raises(ExchangeError) as caught:
        object_collectives.gather("hello", None)
    return str(caught.value)


@pytest.mark.parametrize("size", [2**62, -1])
def test_a_size_that_is_a_lie(size: int) -> None:
    assert f"a rank wants to say {size} bytes" in run(2, _boast, size)[0]


def _alone() -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank():
        return ""
    with pytest.raises(ExchangeError) as caught:
        object_collectives.gather("is anybody there", group)
    return str(caught.value)


def test_a_rank_that_says_nothing() -> None:
    assert "all-gather of what ranks tell each other outside of steps" in run(2, _alone)[0]


def _no_facts() -> str:
    if dist.get_rank():
        object_collectives.gather(7, None)
        return ""
    with pytest.raises(AttachError) as caught:
        agree(None, {"step": 3})
    return str(caught.value)


def test_a_rank_that_says_something_else() -> None:
    assert run(2, _no_facts)[0] == "rank 1 says 7 where facts were expected"
