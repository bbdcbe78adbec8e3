"""Every leaf of the tree is run: with codecs that lose nothing it gives the mean, and sends what the formulas say."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.chains import identity  # noqa: F401
from thinwire.chains import tree
from thinwire.chains.chain import choose
from thinwire.chains.tree import Leaf
from thinwire.codecs import Codec, parse
from thinwire.engine.rank_state import Safety
from thinwire.errors import ChainError

SCATTER = tree.espresso(1, roots=False)
ROOTS = [leaf for leaf in tree.espresso(1) if leaf not in SCATTER]
SUMMED = [leaf for leaf in tree.full() if leaf.summed]


def codec_of(leaf: Leaf) -> Codec:
    return parse("identitysum" if leaf.summed else "identity" if leaf.compressions else "dense")


def exchange_of(leaf: Leaf, elements: int, ranks: int, ranks_per_node: int) -> thinwire.Exchange:
    world = thinwire.LocalWorld(ranks, ranks_per_node)
    return thinwire.Exchange({"a": torch.empty(elements)}, codec_of(leaf), world, chain=str(leaf), min_elements=0)


def integers(elements: int, ranks: int, seed: int) -> list[torch.Tensor]:
    """Multiples of 3, so that means over 4 and 6 ranks are exact, whatever is added or divided first."""
    generator = torch.Generator().manual_seed(seed)
    return [3.0 * torch.randint(-1000, 1000, (elements,), generator=generator) for _ in range(ranks)]


def formula(leaf: Leaf, elements: int, ranks: int, each: int, capacities: list[int]) -> dict[str, float]:
    """Bytes on a link, by section 3.2 of the specification, on padded shards; no code of the chain is used here.

    `e` are elements a holder, `q` messages that are not added up, of which each of `s` pieces has one from every source.
    """
    counts = {"flat": ranks, "intra": each, "inter": ranks // each}
    total = dict.fromkeys(counts, 0.0)
    e, q, s, position, divided, told = elements, 0, 1, -1, False, 0
    sizes: list[int] = []
    ops = leaf.ops
    for number, op in enumerate(ops):
        if op.routine == "comp":
            position, q, divided = position + 1, 1, False
            following = [later for later in ops[number:] if later.scope is not None or later.routine == "dec"]
            until = following[: [later.routine for later in following].index("dec")]
            s = 1
            for later in until:
                s *= counts[later.scope or ""] if later.divides else 1
            continue
        if op.routine == "dec":
            q, told = 0, told + divided
            continue
        assert op.scope is not None
        p = counts[op.scope]
        note = 4 * told
        m = 4 * e if not op.compressed or leaf.summed else q * s * capacities[position]
        if op.routine == "AR":
            total[op.scope] += 2 * (p - 1) / p * m
        elif op.routine in ("RS", "A2A"):
            sizes.append(e)
            e = -(-e // p)
            m = 4 * e * p if op.routine == "RS" else m
            total[op.scope] += (p - 1) / p * m
            q, s = q * p, s // p if op.compressed else s
        elif op.routine in ("R", "G"):
            sizes.append(e)
            total[op.scope] += (m if op.routine == "R" else (p - 1) * m) if p > 1 else 0
            q = q * p
        elif op.routine == "B":
            total[op.scope] += m + note if p > 1 else 0
            e = sizes.pop()
        else:
            total[op.scope] += (p - 1) * (m + note)
            second = len(sizes) == (2 if op.scope == "inter" else 1)
            if second:
                e, s = sizes.pop(), s * p
            else:
                q = q * p
        divided |= op.first
    return {scope: size for scope, size in total.items() if size}


@pytest.mark.parametrize(
    ("ranks", "each", "elements"),
    [(ranks, each, elements) for ranks, each in ((4, 2), (6, 3)) for elements in (1, 5, 1000, 100_003)]
    + [(3, 3, 5), (3, 1, 5), (1, 1, 5), (1, 1, 0), (4, 2, 0)],
)
def test_every_leaf_gives_the_mean_and_sends_what_the_formula_says(ranks: int, each: int, elements: int) -> None:
    given = integers(elements, ranks, elements + ranks)
    mean = torch.stack(given).double().mean(0).float()
    leaves = SCATTER + SUMMED
    leaves += ROOTS if elements in (5, 1000) else []
    for leaf in leaves:
        exchange = exchange_of(leaf, elements, ranks, each)
        assert exchange.executor is not None
        for _ in range(2 if elements < 10_000 else 1):
            chains = [rank_state.groups[0].chain for rank_state in exchange.executor.rank_states]
            capacities = [
                [p.capacity.value for p in chain.positions if p.capacity] if chain else [] for chain in chains
            ]
            tensors = [{"a": tensor.clone()} for tensor in given]
            exchange.reduce_(tensors)
            for rank, result in enumerate(tensors):
                assert torch.equal(result["a"], mean), f"{leaf}, rank {rank}"
            for rank_state, chain, sizes in zip(exchange.executor.rank_states, chains, capacities, strict=True):
                if chain is not None and rank_state.rank == 0:
                    expected = formula(leaf, elements, ranks, each, sizes)
                    found = {scope: size for scope, size in rank_state.groups[0].way.traffic.items() if size}
                    assert found == pytest.approx(expected), leaf


@pytest.mark.parametrize("leaf", SCATTER + ROOTS + SUMMED, ids=str)
def test_one_value_that_is_not_finite_makes_every_rank_void(leaf: Leaf) -> None:
    for ranks, each, elements in ((4, 2, 1000), (6, 3, 5)):
        exchange = exchange_of(leaf, elements, ranks, each)
        assert exchange.executor is not None
        for rank_state in exchange.executor.rank_states:
            rank_state.protect(Safety(tests_results=True))
        for place in (0, elements // 2, elements - 1):
            tensors = [{"a": tensor} for tensor in integers(elements, ranks, 0)]
            tensors[1]["a"][place] = float("inf")
            exchange.reduce_(tensors)
            assert all(rank_state.last_void for rank_state in exchange.executor.rank_states), place
            assert all(bool(result["a"].isnan().all()) for result in tensors)
            left = [value for rank_state in exchange.executor.rank_states for _, value in rank_state.residuals.named()]
            assert all(bool(torch.isfinite(value).all()) for value in left)


def test_chains_that_a_codec_cannot_run() -> None:
    for codec, chain, why in (
        ("topk", "A", "compresses nothing"),
        ("dense", "B", "which dense does not"),
        ("topk", "comp fARc dec", "adds messages on their way"),
        ("micro", "B", "sums payloads"),
    ):
        with pytest.raises(ChainError, match=why):
            choose(codec, chain)
    with pytest.raises(ChainError, match="names a chain already"):
        choose("topk via B", "C")
    with pytest.raises(ChainError, match="needs nodes: LocalWorld"):
        thinwire.Exchange({"a": torch.empty(5000)}, "topk via B", thinwire.LocalWorld(4))


def test_what_a_codec_does_by_itself_is_no_chain() -> None:
    assert choose("topk via J")[1] == choose("micro via comp fARc dec")[1] == choose("dense via fAR")[1] == ""
    assert choose("topk via  iRS  comp eAGc dec iAG")[1] == tree.NAMED["B"]
    assert choose("int8")[1] == tree.NAMED["K"]
    assert choose("int8 via J")[1] == ""
