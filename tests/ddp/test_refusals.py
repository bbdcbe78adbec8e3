"""What `attach` and `Exchange` refuse: a clear error on every rank, before the first step, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.models import mlp, wrapped
from tests.ranks import run
from thinwire.codecs import CodecState, Message, register
from thinwire.errors import AttachError


@dataclass(frozen=True)
class Nameless(thinwire.TopK):
    """A codec that nobody registered."""


@dataclass(frozen=True)
class Fragile(thinwire.TopK):
    """A codec that does not work on the machine of one rank."""

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        if dist.get_rank() == 1:
            raise OSError("no such instruction")
        return super().encode(gradient, residual, state)


register("fragile", Fragile)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2000, dtype=torch.complex64))


def _taken() -> DistributedDataParallel:
    ddp = wrapped()
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def _taken_by_builtin() -> DistributedDataParallel:
    ddp = wrapped()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return ddp


def _attached() -> DistributedDataParallel:
    ddp = wrapped()
    thinwire.attach(ddp, "topk(density=0.5)")
    return ddp


def _other(rank: int) -> bool:
    return dist.get_rank() == rank


def _explode(name: str) -> bool:
    raise LookupError(f"no opinion on {name}")


# What is done, and what all ranks must be told.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "not ddp": (lambda: thinwire.attach(mlp(), "dense"), "needs a DistributedDataParallel, not Sequential"),
    "second attach": (lambda: thinwire.attach(_attached(), "dense"), r"topk\(density=0.5\) is attached to this module"),
    "taken": (lambda: thinwire.attach(_taken(), "dense"), "hook of this module is taken by fp16_compress_hook"),
    "taken by builtin": (lambda: thinwire.attach(_taken_by_builtin(), "dense"), "hook of this module is taken by"),
    "sparse": (
        lambda: thinwire.attach(wrapped(nn.Sequential(nn.Embedding(50, 40, sparse=True))), "topk"),
        "'0' makes sparse gradients",
    ),
    "complex": (lambda: thinwire.attach(wrapped(Complex()), "topk"), "'phase' is torch.complex64"),
    "unknown": (lambda: thinwire.attach(wrapped(), "topkk(density=0.1)"), r"'topkk\(density=0.1\)'.*mean 'topk'"),
    "argument": (lambda: thinwire.attach(wrapped(), "topk(densty=0.1)"), "no argument 'densty'.*density"),
    "value": (lambda: thinwire.attach(wrapped(), "topk(density=2)"), "density must be above 0 and at most 1, not 2"),
    "class": (lambda: thinwire.attach(wrapped(), thinwire.TopK), "is not a codec: give"),  # type: ignore[arg-type]
    "unregistered": (lambda: thinwire.attach(wrapped(), Nameless(0.1)), "Nameless is not registered"),
    "min_elements": (lambda: thinwire.attach(wrapped(), "topk", min_elements=-1), "must not be negative"),
    "exclude": (lambda: thinwire.attach(wrapped(), "topk", exclude=_explode), "no opinion on 0.weight"),
    "exclude of numbers": (lambda: thinwire.attach(wrapped(), "topk", exclude=[3]), "exclude"),  # type: ignore[list-item]
    "other codec": (
        lambda: thinwire.attach(wrapped(), f"topk(density={0.5 if _other(2) else 0.25})"),
        r"codec: rank 0 has 'topk\(density=0.25\)', rank 2 has 'topk\(density=0.5\)'",
    ),
    "other options": (lambda: thinwire.attach(wrapped(), "topk", min_elements=9 if _other(1) else 10), "options: .*rank 1"),
    "other exclude": (
        lambda: thinwire.attach(wrapped(), "topk", exclude=["0.*"] if _other(1) else ["2.*"]),
        "excluded: rank 0 has 2.weight, rank 1 has 0.weight",
    ),
    "error on one rank": (lambda: thinwire.attach(wrapped(), "topk" if _other(1) else "tpk"), "there is no codec 'tpk'"),
    "unregistered on one rank": (
        lambda: thinwire.attach(wrapped(), Nameless(0.1) if _other(1) else thinwire.TopK(0.1)),
        "Nameless is not registered",
    ),
    "exclude fails on one rank": (
        lambda: thinwire.attach(wrapped(), "topk", exclude=_explode if _other(2) else ()),
        "no opinion on 0.weight",
    ),
    "codec fails on one rank": (
        lambda: thinwire.attach(wrapped(), Fragile()),
        "fragile fails in a rehearsal.*OSError: no such instruction",
    ),
    "exchange: not a codec": (lambda: thinwire.Exchange({"a": torch.zeros(9)}, 0.1), "0.1 is not a codec"),  # type: ignore[arg-type]
    "exchange: other shapes": (
        lambda: thinwire.Exchange({"a": torch.zeros(30 if _other(1) else 20)}, "topk"),
        r"tensors: rank 0 has name 'a', shape \[20\], .*, rank 1 has .*\[30\]",
    ),
    "exchange: other names": (
        lambda: thinwire.Exchange({"a" if _other(1) else "b": torch.zeros(20)}, "topk"),
        "tensors: rank 0 has .*'b'.*, rank 1 has .*'a'",
    ),
    "exchange: fewer tensors": (
        lambda: thinwire.Exchange({str(i): torch.zeros(20) for i in range(3 + _other(1))}, "topk"),
        "tensors: rank 0 has 3, rank 1 has 4",
    ),
    "exchange: other exclude": (
        lambda: thinwire.Exchange({"a": torch.zeros(2000)}, "topk", exclude=["a"] if _other(1) else ()),
        "excluded: rank 0 has 0, rank 1 has 1",
    ),
    "exchange: other options": (
        lambda: thinwire.Exchange({"a": torch.zeros(2000)}, "topk", group_bytes=9 if _other(2) else 10),
        "options: .*rank 2",
    ),
    "exchange: error on one rank": (
        lambda: thinwire.Exchange({"a": torch.zeros(20)}, "tpk" if _other(1) else "topk"),
        "there is no codec 'tpk'",
    ),
    "exchange: integers": (lambda: thinwire.Exchange({"a": torch.zeros(20, dtype=torch.int64)}, "topk"), "'a' is int64"),
    "exchange: complex": (
        lambda: thinwire.Exchange({"a": torch.zeros(20, dtype=torch.complex64)}, "dense"),
        "'a' is complex64",
    ),
}  # fmt: skip


def _all_cases() -> dict[str, str]:
    """The text of the error of every case; no rank may be left behind in any of them."""
    texts = {}
    for name, (refused, _) in CASES.items():
        try:
            refused()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
        else:
            texts[name] = "no error"
        dist.barrier()
    return texts


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return run(3, _all_cases)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told(case: str, told: list[dict[str, str]]) -> None:
    for rank in range(3):
        assert told[rank][case].startswith("AttachError"), (rank, told[rank][case])
        with pytest.raises(AttachError, match=CASES[case][1]):
            raise AttachError(told[rank][case])


def test_a_refusal_changes_nothing() -> None:
    run(2, _refused_then_attached)


def _refused_then_attached() -> None:
    ddp = wrapped()
    with pytest.raises(AttachError):
        thinwire.attach(ddp, "topk" if dist.get_rank() else "dense")
    thinwire.attach(ddp, "topk")
