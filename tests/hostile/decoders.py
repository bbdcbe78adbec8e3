"""The decoder of every codec against messages of its own that were spoilt, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.hostile import attacks
from thinwire.codecs import GatheredCodec, GroupInfo, MiCRO, ParameterInfo, parse
from thinwire.errors import MessageError
from thinwire.messages import HEADER_BYTES

RANKS = 3
GUARD, UNTOUCHED = 64, -7.0

TEXTS = [
    "topk(density=0.05)",
    "topk(density=0.3, values='fp16')",
    "topk(density=1.0, values='bf16')",
    "laplace(density=0.02)",
    "dgc(density=0.05)",
    "sidco(density=0.05)",
    "adacomp(bin_conv=20, bin_dense=300)",
    "adacomp(bin_conv=300, bin_dense=20, scale='layer')",
    "int8(block=7)",
    "int8",
    "sign(block=5)",
    "sign",
    "micro(density=0.05)",
    "micro(density=0.2, threshold='layer', balance=True)",
]

GROUPS = [
    GroupInfo("one", 1, (ParameterInfo("a", 0, 1, (1,), "bias"),)),
    GroupInfo("small", 40, (ParameterInfo("a", 0, 17, (17,), "bias"), ParameterInfo("b", 20, 20, (4, 5), "linear"))),
    GroupInfo(
        "mixed",
        2600,
        (
            ParameterInfo("kernel", 0, 900, (10, 10, 3, 3), "conv"),
            ParameterInfo("matrix", 1000, 1600, (40, 40), "linear"),
        ),
    ),
]


class Target:
    """The decoder of one codec for one group, and good messages of all ranks to begin with."""

    def __init__(self, text: str, group: GroupInfo, random: np.random.Generator) -> None:
        self.codec = parse(text).at(0)
        self.group = group
        self.states = [self.codec.start(group, rank, RANKS) for rank in range(RANKS)]
        self.everything = torch.full((group.elements + 2 * GUARD,), UNTOUCHED)
        self.out = self.everything[GUARD : GUARD + group.elements]
        self.pool = [self._good(random) for _ in range(6)]

    def _good(self, random: np.random.Generator) -> list[Tensor]:
        """What all ranks would gather in a step, with room enough or without."""
        smallest = self.codec.smallest_capacity(self.group)
        size = int(random.choice([smallest, 2 * smallest, HEADER_BYTES + 8 * self.group.elements + smallest]))
        messages = []
        for state in self.states:
            state.outgoing = torch.zeros(size, dtype=torch.uint8)
            gradient = torch.zeros(self.group.elements)
            for p in self.group.parameters:
                gradient[p.offset : p.offset + p.elements] = torch.from_numpy(
                    random.standard_normal(p.elements)
                ).float()
            residual = torch.zeros_like(gradient)
            if isinstance(self.codec, GatheredCodec):
                self.codec.encode(gradient, residual, state)
            else:
                assert isinstance(self.codec, MiCRO)
                state.steps, state.thresholds = 1, np.full_like(state.thresholds, 1.0)  # type: ignore[attr-defined]
                next(self.codec.exchange(gradient, residual, state))
            messages.append(state.outgoing)
        return messages

    def decoders(self) -> dict[str, Callable[[Sequence[Tensor]], object]]:
        state, codec = self.states[0], self.codec
        if isinstance(codec, MiCRO):
            return {"read": lambda messages: codec._read(messages, state)}  # type: ignore[arg-type]
        assert isinstance(codec, GatheredCodec)
        return {
            "write": lambda messages: codec.write(messages, self.out, 1.0 / RANKS, state),
            "decode": lambda messages: codec.decode(messages, self.out, 1.0, state),
        }

    def intact(self) -> bool:
        around = torch.cat([self.everything[:GUARD], self.everything[-GUARD:]])
        return bool((around == UNTOUCHED).all())


def storm(seed: int, count: int) -> Counter[str]:
    """Decode `count` spoilt messages, in turns over all codecs and groups; counts the outcomes. Others are failures."""
    random = np.random.default_rng(seed)
    targets = [Target(text, group, random) for text in TEXTS for group in GROUPS]
    outcomes: Counter[str] = Counter()
    for i in range(count):
        target = targets[i % len(targets)]
        messages = list(attacks.pick(random, target.pool))
        at = int(random.integers(RANKS))
        if random.random() < 0.1:
            messages[at] = torch.from_numpy(random.integers(0, 256, messages[at].numel(), dtype=np.uint8))
            done = "random bytes"
        else:
            messages[at] = messages[at].clone()
            done = attacks.spoil(random, messages[at].numpy())
        for way, decode in target.decoders().items():
            try:
                decode(messages)
                outcomes["valid"] += 1
            except MessageError as error:
                outcomes[type(error).__name__] += 1
            except Exception as error:
                text = f"{target.codec} of {target.group.name!r}, {way}, {done}: {error!r}"
                raise attacks.Escaped(text, messages) from error
        assert target.intact(), f"{target.codec} of {target.group.name!r}, {done}: written out of bounds"
    return outcomes
