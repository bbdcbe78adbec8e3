"""Espresso's strategy tree: every chain of compressions and collectives that can exchange one tensor.

A leaf is written as its operations, one after the other (`iRS comp eAGc dec iAG`):

    f, i, e     over all ranks (flat), ranks of one node (intra), ranks with the same local rank on all nodes (inter)
    AR          all-reduce, in one step
    RS ... AG   reduce-scatter and the all-gather that completes it; A2A ... AG for messages
    R ... B     reduce to the first rank and the broadcast that completes it; G (gather) ... B for messages
    c           suffix: the collective carries messages. AGc without a first step all-gathers all messages
    comp, dec   compress, decompress and add up; `comp@cpu`: on the CPU, for tensors on any device

`espresso()` is the paper's tree (figure 8): 4341 leaves with two devices. `full()` also has what the paper excludes: payloads
that can be added without decoding, `comp fARc dec`. See `docs/methods/espresso.md`.
"""

import difflib
import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..comm.collectives import Scope
from ..errors import ChainTextError

SCOPES: dict[str, Scope] = {"f": "flat", "i": "intra", "e": "inter"}
LETTERS: dict[Scope, str] = {scope: letter for letter, scope in SCOPES.items()}

NAMED = {
    "A": "iRS eAR iAG",
    "B": "iRS comp eAGc dec iAG",
    "C": "iRS comp eAGc iAGc dec",
    "D": "iRS comp eA2Ac dec comp eAGc dec iAG",
    "E": "iRS comp eA2Ac dec comp eAGc iAGc dec",
    "F": "iRS eRS comp eAGc dec iAG",
    "G": "comp iA2Ac dec comp eAGc iAGc dec",
    "H": "comp iA2Ac dec comp eA2Ac dec comp eAGc iAGc dec",
    "I": "comp iA2Ac eA2Ac dec comp eAGc iAGc dec",
    "J": "comp fAGc dec",
    "K": "comp fA2Ac dec comp fAGc dec",
}
"""Useful leaves, by letter; see `docs/chains.md`."""

_TOKEN = re.compile(r"(comp|dec)(?:@(cpu))?|([fie])(AR|RS|AG|A2A|R|G|B)(c?)")
_SCATTER = {"RS": "AG", "A2A": "AG"}
_ROOT = {"R": "B", "G": "B"}


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a chain."""

    routine: str
    scope: Scope | None = None
    compressed: bool = False
    device: str = ""

    def __str__(self) -> str:
        if self.scope is None:
            return f"{self.routine}@{self.device}" if self.device else self.routine
        return f"{LETTERS[self.scope]}{self.routine}{'c' if self.compressed else ''}"

    @property
    def divides(self) -> bool:
        """Whether every rank keeps one part of its data."""
        return self.routine in _SCATTER

    @property
    def first(self) -> bool:
        """The first step of a pair."""
        return self.routine in _SCATTER or self.routine in _ROOT


@dataclass(frozen=True, slots=True)
class Leaf:
    """A chain from the gradients of all ranks to their mean on all ranks."""

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.ops))

    @property
    def compressions(self) -> int:
        return sum(op.routine == "comp" for op in self.ops)

    @property
    def summed(self) -> bool:
        """Whether payloads are summed by the codec's own all-reduces."""
        return any(op.routine == "AR" and op.compressed for op in self.ops)

    @property
    def hierarchical(self) -> bool:
        return any(op.scope in ("intra", "inter") for op in self.ops)


def parse(text: str) -> Leaf:
    """A leaf from its letter (`"B"`) or its notation. Only leaves of the grammar are accepted."""
    notation = " ".join(NAMED.get(text.strip(), text).split())
    try:
        leaf = Leaf(tuple(_op(token) for token in notation.split()))
    except ValueError as error:
        raise ChainTextError(f"{text!r} is not a chain: {error}; known letters: {', '.join(NAMED)}") from None
    if notation not in _known():
        close = difflib.get_close_matches(notation, _known(), n=1, cutoff=0.0)
        raise ChainTextError(f"{text!r} is not a leaf of the tree; the nearest is {close[0]!r}")
    return leaf


def _op(token: str) -> Op:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(f"{token!r} is no operation")
    work, device, letter, routine, compressed = match.groups()
    if work:
        return Op(work, device=device or "")
    return Op(routine, SCOPES[letter], bool(compressed))


@functools.cache
def _known() -> dict[str, None]:
    return {str(leaf): None for leaf in full(devices=2)}


def espresso(devices: int = 2, *, roots: bool = True) -> list[Leaf]:
    """The paper's tree: 4341 leaves with two devices, 174 with one; without `roots` (R, G, B) 1188 and 54."""
    return _Grammar(devices, roots).leaves(summed=False)


def full(devices: int = 1, *, roots: bool = True) -> list[Leaf]:
    """The paper's tree and the leaves of codecs whose payloads can be summed: casts, random blocks, MiCRO, low rank.

    In these the codec itself runs from `comp` to `dec`, in as many rounds as it needs, over all ranks or between nodes.
    """
    return _Grammar(devices, roots).leaves(summed=True)


Words = tuple[str, ...]


def _then(*parts: Iterable[Words]) -> list[Words]:
    """Every sequence with one element of each part."""
    return [tuple(itertools.chain(*words)) for words in itertools.product(*parts)]


class _Grammar:
    """The grammar, rule by rule; `end` is the routine that completes the pair of a scope (AG or B)."""

    def __init__(self, devices: int, roots: bool) -> None:
        if devices not in (1, 2):
            raise ValueError(f"there are one or two devices, not {devices}")
        on = ("", "@cpu")[:devices]
        self.comp: list[Words] = [(f"comp{device}",) for device in on]
        self.dec: list[Words] = [(f"dec{device}",) for device in on]
        # first step uncompressed, first step compressed, second step
        self.pairs = [("RS", "A2A", "AG"), ("R", "G", "B")][: 2 if roots else 1]

    def leaves(self, summed: bool) -> list[Leaf]:
        words = self._flat(summed) + self._hierarchical(summed)
        return [Leaf(tuple(_op(word) for word in each)) for each in words]

    def _flat(self, summed: bool) -> list[Words]:
        found = [("fAR",), *_then(self.comp, [("fAGc",)], self.dec)]
        if summed:
            found += _then(self.comp, [("fARc",)], self.dec)
        for first, first_c, end in self.pairs:
            found += _then([(f"f{first}",)], self._t1(f"f{end}"))
            found += _then(self.comp, [(f"f{first_c}c",)], self._t2(f"f{end}"))
        return found

    def _hierarchical(self, summed: bool) -> list[Words]:
        found: list[Words] = []
        for first, first_c, end in self.pairs:
            exact, coded = [(f"i{first}",)], _then(self.comp, [(f"i{first_c}c",)])
            t3, t4 = self._t3(f"i{end}"), self._t4(f"i{end}")
            found += _then(exact, t3)
            found += _then(exact, self.comp, t4)
            found += _then(coded, t4)
            found += _then(coded, self.dec, t3)
            found += _then(coded, self.dec, self.comp, t4)
            if summed:
                found += _then(exact, self.comp, [("eARc",)], self.dec, [(f"i{end}",)])
        return found

    def _t1(self, end: str) -> list[Words]:
        return [(end,), *_then(self.comp, [(f"{end}c",)], self.dec)]

    def _t2(self, end: str) -> list[Words]:
        return _then([(f"{end}c",)], self.dec) + _then(self.dec, self._t1(end))

    def _t3(self, end: str) -> list[Words]:
        found = _then([("eAR",)], self._t1(end))
        for first, _, inner in self.pairs:
            found += _then([(f"e{first}",)], self._t5(f"e{inner}", end))
        return found

    def _t4(self, end: str) -> list[Words]:
        found = _then([("eAGc",)], self._t2(end))
        for _, first_c, inner in self.pairs:
            found += _then([(f"e{first_c}c",)], [(f"e{inner}c",)], self._t2(end))
            found += _then([(f"e{first_c}c",)], self.dec, self._t5(f"e{inner}", end))
        return found

    def _t5(self, inner: str, end: str) -> list[Words]:
        return _then([(inner,)], self._t1(end)) + _then(self.comp, [(f"{inner}c",)], self._t2(end))
