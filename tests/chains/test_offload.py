"""Comps and Decomps on another device than the tensors: the logic, with memory of the processor in both parts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thinwire
from tests.codecs.laws import gradients
from thinwire.chains import offload, tree
from thinwire.chains.offload import Copies, ToHost
from thinwire.errors import ChainError

SHAPES = {"a": (30, 41), "c": (50, 53)}


class Late(Copies):
    """Copies that happen only when somebody waits for them: who forgets to wait finds nonsense."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), 77, dtype=dtype)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), 99, dtype=dtype)

    def down(self, host: Tensor, tensor: Tensor) -> Callable[[], None]:
        def wait() -> None:
            self.threads.add(threading.current_thread().name)
            host.copy_(tensor)

        return wait

    def up(self, tensor: Tensor, host: Tensor) -> None:
        tensor.copy_(host)


@pytest.mark.parametrize("letter", ["B", "H", "K"])
def test_results_do_not_depend_on_where_a_codec_works(letter: str) -> None:
    results = []
    for elsewhere in (False, True):
        exchange = thinwire.Exchange(
            {name: torch.empty(shape) for name, shape in SHAPES.items()},
            "topk(density=0.05)",
            thinwire.LocalWorld(4, 2),
            chain=letter,
            min_elements=50,
        )
        assert exchange.executor is not None
        copies = Late()
        for rank_state in exchange.executor.rank_states if elsewhere else ():
            for group in rank_state.groups:
                assert group.chain is not None
                group.chain.offload = ToHost(copies)
        for step in range(3):
            given = gradients(SHAPES, 4, "normal", step)
            exchange.reduce_(given)
        results.append([given[3][name].clone() for name in SHAPES])
        assert not elsewhere or (copies.threads and all("offload" in name for name in copies.threads))
    assert all(torch.equal(here, there) for here, there in zip(*results, strict=True))


def test_an_error_of_the_worker_comes_back() -> None:
    def fail() -> None:
        raise ValueError("in the worker")

    with pytest.raises(ValueError, match="in the worker"):
        ToHost(Late()).work(fail)


def test_a_device_without_kernels() -> None:
    with pytest.raises(ChainError, match=r"no kernels for cuda:0 yet; write comp@cpu"):
        offload.make(torch.device("cuda:0"), tree.parse("B"))
    assert isinstance(offload.make(torch.device("cpu"), tree.parse("comp@cpu fAGc dec@cpu")), offload.InThread)
