"""Laws that every registered codec obeys. A new codec is tested by being registered."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.codecs import laws
from tests.support.profiles import tries
from thinwire.codecs import CODECS, CodecState, Estimate, GroupInfo, Message, TopK, parse, register

# Texts beside the default one; a codec that is not here is tested with its defaults, and at a density of 0.1 if it has one.
TEXTS = {
    "cast": ["cast(dtype='fp16')"],
    "topk": ["topk(density=0.1)", "topk(density=0.5, values='fp16')", "topk(density=0.3, values='bf16')"],
    "laplace": ["laplace(density=0.1)", "laplace(density=0.2, exact=True)", "laplace(density=0.3, values='fp16')"],
    "micro": [
        "micro(density=0.1)",
        "micro(density=0.3, threshold='layer', balance=True)",
        "micro(density=0.05, balance=True)",
        "micro(density=0.2, values='bf16')",
        "micro(density=0.1, controller='fixed', start_from='formula')",
    ],
    "adacomp": ["adacomp(bin_conv=5, bin_dense=16)", "adacomp(scale='layer')"],
    "randomblock": ["randomblock(ratio=3.0)", "randomblock(ratio=1)"],
    "dgc": ["dgc(density=0.1)", "dgc(density=0.2, values='fp16')"],
    "int8": ["int8(block=100)"],
    "sign": ["sign(block=100)"],
    "lowrank": ["lowrank(rank=1)"],
}


# Codecs with a threshold that is estimated, from a sample or from the steps before: density 1 is a target, not a promise.
ESTIMATED = {"micro", "sidco"}
# Codecs whose results are sums over many elements, and round like the largest of them.
MIXES = {"lowrank"}
# What these send is decided by the data, or by a controller that needs thousands of steps.
UNSETTLED = {"adacomp", "sidco", "micro(density=0.1, controller='fixed', start_from='formula')"}

# What tests register for themselves, some of it broken on purpose, is left out.
NAMES = [name for name, kind in CODECS.items() if kind.__module__.startswith("thinwire.")]


def _has_density(name: str) -> bool:
    return any(field.name == "density" for field in dataclasses.fields(CODECS[name]))


def _texts(name: str) -> list[str]:
    return [name, *TEXTS.get(name, [f"{name}(density=0.1)"] if _has_density(name) else [])]


ALL = [text for name in NAMES for text in _texts(name)]
SPARSE = [text for text in ALL if hasattr(parse(text), "density")]

SHAPES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.one_of(
        st.just((0, 3)),
        st.just((1,)),
        st.just((7,)),
        st.tuples(st.integers(1, 40), st.integers(1, 60)),
        st.tuples(st.integers(1, 6), st.integers(1, 7), st.just(3), st.just(3)),
        st.just((4097,)),
    ),
    min_size=1,
)
KINDS = st.lists(st.sampled_from(["normal", "heavy", "mostly zero", "constant"]), min_size=1, max_size=4)

lawful = settings(max_examples=tries(25), derandomize=True)


def test_the_main_codecs_are_among_them() -> None:
    assert {"dense", "cast", "topk"} <= set(NAMES)
    assert set(TEXTS) <= set(NAMES)


@pytest.mark.parametrize("text", ALL)
@lawful
@given(
    shapes=SHAPES, ranks=st.integers(1, 4), kinds=KINDS, seed=st.integers(0, 10**6), least=st.sampled_from([0, 8, 64])
)
@example(shapes={"a": (0, 3)}, ranks=2, kinds=["normal", "normal"], seed=0, least=0)
@example(shapes={"a": (1,)}, ranks=1, kinds=["normal"] * 3, seed=0, least=0)
@example(shapes={"a": (30, 30), "b": (7,), "c": (20, 20)}, ranks=3, kinds=["heavy", "normal"] * 2, seed=1, least=64)
@example(shapes={"a": (7,), "b": (1,)}, ranks=2, kinds=["normal", "normal"], seed=2, least=64)
@example(shapes={"a": (1, 5, 3, 3), "b": (4097,), "c": (4097,)}, ranks=4, kinds=["heavy"] * 2, seed=43082, least=0)
@example(shapes={"a": (5, 26)}, ranks=1, kinds=["mostly zero"] * 2, seed=23438, least=0)
def test_conservation_and_equal_replicas(
    text: str, shapes: dict[str, tuple[int, ...]], ranks: int, kinds: list[str], seed: int, least: int
) -> None:
    codec = parse(text)
    for chain in {None, laws.own(codec)}:
        laws.check_steps(codec, shapes, ranks, kinds, seed, least, chain=chain, mixes=text.split("(")[0] in MIXES)


@pytest.mark.parametrize("text", SPARSE)
@lawful
@given(shapes=SHAPES, ranks=st.integers(1, 4), seed=st.integers(0, 10**6))
@example(shapes={"a": (40, 60), "b": (4097,), "c": (7,)}, ranks=3, seed=0)
def test_density_one_is_the_dense_mean(text: str, shapes: dict[str, tuple[int, ...]], ranks: int, seed: int) -> None:
    laws.check_density_one(parse(text), shapes, ranks, seed, exact=text.split("(")[0] not in ESTIMATED)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("text", ALL)
def test_zeros_send_nothing(text: str, ranks: int) -> None:
    laws.check_nothing(parse(text), {"a": (40, 50), "b": (5,), "c": (3, 3, 3, 3), "d": (0,)}, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("text", [text for text in ALL if not {text, text.split("(")[0]} & UNSETTLED])
def test_estimate_is_within_a_factor_two(text: str, ranks: int) -> None:
    laws.check_estimate(parse(text), ranks)


@pytest.mark.parametrize("text", ALL)
def test_text_form(text: str) -> None:
    laws.check_text(parse(text))


@dataclasses.dataclass(frozen=True)
class Broken(TopK):
    """A codec that breaks one law, to show that the laws see it."""

    how: str = ""

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        message = super().encode(gradient, residual, state)
        largest = residual.abs().argmax()
        if self.how == "loses":
            residual[largest] = 0.0
        elif self.how == "grows" or (self.how == "grows on one rank" and state.rank == 1):
            residual[largest] = torch.nextafter(residual[largest], torch.tensor(100.0))
        return message

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        super().decode(messages, out, scale * (1.000002 if self.how == "scales" else 1.0), state)
        if self.how == "differs" and state.rank == 1 and out.numel():
            out[0] = torch.nextafter(out[0], torch.tensor(100.0))
        if self.how == "invents" and not out.any() and out.numel():
            out[0] = 1e-3

    def target(self, group: GroupInfo) -> int:
        return super().target(group) - (self.how == "keeps one")

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        honest = super().estimate(group, world)
        return dataclasses.replace(honest, gathered=3 * honest.gathered if self.how == "promises" else honest.gathered)


register("broken", Broken)


@pytest.mark.parametrize(
    ("how", "law"),
    [
        ("loses", "conservation"),
        ("grows", "conservation"),
        ("grows on one rank", "conservation"),
        ("scales", "conservation"),
        ("differs", "conservation"),
        ("invents", "nothing"),
        ("keeps one", "density one"),
        ("promises", "estimate"),
    ],
)
def test_a_broken_law_is_seen(how: str, law: str) -> None:
    shapes = {"a": (30, 30), "b": (7,)}
    for codec, broken in ((Broken(0.1), False), (Broken(0.1, how=how), True)):
        with pytest.raises(AssertionError) if broken else contextlib.nullcontext():
            if law == "conservation":
                laws.check_steps(codec, shapes, 2, ["normal"] * 2, 0, 8)
            elif law == "nothing":
                laws.check_nothing(codec, shapes, 2)
            elif law == "density one":
                laws.check_density_one(codec, shapes, 2, 0)
            else:
                laws.check_estimate(codec, 2)
