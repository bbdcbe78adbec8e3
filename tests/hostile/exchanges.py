"""Whole exchanges in which somebody spoils messages on their way: every codec, and chains, through the engine itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

import thinwire
from tests.hostile import attacks
from thinwire.codecs import CODECS
from thinwire.comm.collectives import Collective, Pending
from thinwire.comm.world import LocalWorld
from thinwire.engine.lifecycle import Lifecycle
from thinwire.errors import ExchangeError, ThinwireError

SHAPES = {"kernel": (6, 5, 3, 3), "matrix": (40, 30), "between": (3,), "vector": (700,)}
MEANT = ("gather", "all to all", "collect", "broadcast")

TEXTS = [
    *(name for name in CODECS if name not in ("dense",)),
    "topk(density=0.1, values='fp16')",
    "topk(density=1.0, values='bf16')",
    "micro(density=0.1, values='bf16')",
    "micro(density=0.05, balance=True, threshold='layer')",
    "adacomp(bin_conv=20, bin_dense=20, scale='layer')",
    "int8(block=7) via J",
    "sign(block=5)",
    "topk(density=0.1) via K",
    "adacomp via B",
    "int8 via D",
    "sign via I",
    "topk(density=0.1) via comp fGc fBc dec",
    "dgc(density=0.1) via H",
    "laplace(density=0.1) via iR comp eGc dec comp eBc iBc dec",
]


class HostileWorld(LocalWorld):
    """Ranks in this process; while it is `armed`, one message is spoilt between its sender and its receivers."""

    def __init__(self, size: int, ranks_per_node: int, random: np.random.Generator) -> None:
        super().__init__(size, ranks_per_node)
        self.random = random
        self.armed = False
        self.attacks: list[str] = []

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        parts, rank = list(parts), int(self.random.integers(self.size))
        part = parts[rank]
        if self.armed and part.operation in MEANT and part.tensor.dtype == torch.uint8 and self.random.random() < 0.5:
            # In a broadcast what is sent is also what is received.
            tensor = part.tensor if part.operation == "broadcast" else part.tensor.clone()
            self.attacks.append(attacks.spoil(self.random, tensor.view(-1).numpy()))
            parts[rank] = dataclasses.replace(part, tensor=tensor)
            self.armed = False
        return super().issue(round_, parts, wake)


def messages_of(text: str) -> bool:
    """Whether a codec sends any: sums have no format that could be wrong."""
    random = np.random.default_rng(0)
    world = HostileWorld(4, 2, random)
    exchange = thinwire.Exchange(_tensors(random), text, world, min_elements=8)
    for step in range(20):
        world.armed = step > 0
        try:
            exchange.reduce_([_tensors(random) for _ in range(4)])
        except ExchangeError:
            return True
    return bool(world.attacks)


def storm(text: str, seed: int, count: int) -> Counter[str]:
    """Exchange until `count` messages were spoilt; counts what came of it. Anything but a named error is a failure."""
    random = np.random.default_rng(seed)
    world = HostileWorld(4, 2, random)
    exchange = thinwire.Exchange(_tensors(random), text, world, min_elements=8)
    assert exchange.executor is not None
    layout, outcomes = exchange.executor.layout, Counter[str]()
    honest = 0
    while len(world.attacks) < count:
        before = len(world.attacks)
        world.armed = honest > 0
        tensors = [_tensors(random) for _ in range(4)]
        honest += 1
        try:
            exchange.reduce_(tensors)
        except ExchangeError as error:
            cause = error.__cause__
            if not isinstance(cause, ThinwireError):
                raise AssertionError(f"{text}: {world.attacks[before:]} end in {cause!r}") from error
            outcomes[type(cause).__name__] += len(world.attacks) - before
            honest = 0
        except ValueError as error:
            # A lie about sizes that only some ranks of a chain have heard. Over gloo the next collective would fail.
            if "the ranks disagree" not in str(error) or " via " not in text:
                raise AssertionError(f"{text}: {world.attacks[before:]} end in {error!r}") from error
            outcomes["disagreement"] += len(world.attacks) - before
            honest = 0
        if not honest:
            session = exchange.session
            session.executor = None  # closed by the error
            session.lifecycle = Lifecycle()
            session.use(session.make(layout))
            continue
        outcomes["valid" if not exchange.skipped_last_step else "void"] += len(world.attacks) - before
        for rank_state in exchange.executor.rank_states:
            for name, residual in rank_state.residuals.named():
                if not bool(torch.isfinite(residual).all()):
                    raise AssertionError(f"{text}: {world.attacks[before:]} leave {name} not finite")
            assert rank_state.bytes < 4_000_000, (
                f"{text}: {world.attacks[before:]} make it take {rank_state.bytes} bytes"
            )
    return outcomes


def _tensors(random: np.random.Generator) -> dict[str, Tensor]:
    scale = 10.0 ** random.integers(-3, 4)
    return {
        name: torch.from_numpy((scale * random.standard_normal(shape)).astype(np.float32))
        for name, shape in SHAPES.items()
    }
