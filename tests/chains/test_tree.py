"""The tree of chains: its counts, its notation, and appendix A of the specification word by word."""

from __future__ import annotations

from collections import Counter

import pytest

from thinwire.chains import tree
from thinwire.errors import ChainTextError

# Appendix A of the specification.
ONE_DEVICE = """
fAR | fRS fAG | fRS comp fAGc dec | comp fAGc dec | comp fA2Ac fAGc dec | comp fA2Ac dec fAG
comp fA2Ac dec comp fAGc dec | iRS eAR iAG | iRS eAR comp iAGc dec | iRS eRS eAG iAG | iRS eRS eAG comp iAGc dec
iRS eRS comp eAGc iAGc dec | iRS eRS comp eAGc dec iAG | iRS eRS comp eAGc dec comp iAGc dec | iRS comp eAGc iAGc dec
iRS comp eAGc dec iAG | iRS comp eAGc dec comp iAGc dec | iRS comp eA2Ac eAGc iAGc dec | iRS comp eA2Ac eAGc dec iAG
iRS comp eA2Ac eAGc dec comp iAGc dec | iRS comp eA2Ac dec eAG iAG | iRS comp eA2Ac dec eAG comp iAGc dec
iRS comp eA2Ac dec comp eAGc iAGc dec | iRS comp eA2Ac dec comp eAGc dec iAG
iRS comp eA2Ac dec comp eAGc dec comp iAGc dec | comp iA2Ac eAGc iAGc dec | comp iA2Ac eAGc dec iAG
comp iA2Ac eAGc dec comp iAGc dec | comp iA2Ac eA2Ac eAGc iAGc dec | comp iA2Ac eA2Ac eAGc dec iAG
comp iA2Ac eA2Ac eAGc dec comp iAGc dec | comp iA2Ac eA2Ac dec eAG iAG | comp iA2Ac eA2Ac dec eAG comp iAGc dec
comp iA2Ac eA2Ac dec comp eAGc iAGc dec | comp iA2Ac eA2Ac dec comp eAGc dec iAG
comp iA2Ac eA2Ac dec comp eAGc dec comp iAGc dec | comp iA2Ac dec eAR iAG | comp iA2Ac dec eAR comp iAGc dec
comp iA2Ac dec eRS eAG iAG | comp iA2Ac dec eRS eAG comp iAGc dec | comp iA2Ac dec eRS comp eAGc iAGc dec
comp iA2Ac dec eRS comp eAGc dec iAG | comp iA2Ac dec eRS comp eAGc dec comp iAGc dec
comp iA2Ac dec comp eAGc iAGc dec | comp iA2Ac dec comp eAGc dec iAG | comp iA2Ac dec comp eAGc dec comp iAGc dec
comp iA2Ac dec comp eA2Ac eAGc iAGc dec | comp iA2Ac dec comp eA2Ac eAGc dec iAG
comp iA2Ac dec comp eA2Ac eAGc dec comp iAGc dec | comp iA2Ac dec comp eA2Ac dec eAG iAG
comp iA2Ac dec comp eA2Ac dec eAG comp iAGc dec | comp iA2Ac dec comp eA2Ac dec comp eAGc iAGc dec
comp iA2Ac dec comp eA2Ac dec comp eAGc dec iAG | comp iA2Ac dec comp eA2Ac dec comp eAGc dec comp iAGc dec
"""


@pytest.mark.parametrize(
    ("devices", "roots", "count"), [(2, True, 4341), (1, True, 174), (2, False, 1188), (1, False, 54)]
)
def test_counts_of_the_paper(devices: int, roots: bool, count: int) -> None:
    leaves = tree.espresso(devices, roots=roots)
    assert len(leaves) == len(set(map(str, leaves))) == count


def test_leaves_by_compressions() -> None:
    assert Counter(leaf.compressions for leaf in tree.espresso()) == {0: 9, 1: 236, 2: 1152, 3: 1920, 4: 1024}
    assert Counter(leaf.compressions for leaf in tree.espresso(1)) == {0: 9, 1: 59, 2: 72, 3: 30, 4: 4}


def test_the_appendix_is_the_tree() -> None:
    listed = [text.strip() for text in ONE_DEVICE.replace("\n", "|").split("|") if text.strip()]
    assert len(listed) == 54
    assert set(listed) == {str(leaf) for leaf in tree.espresso(1, roots=False)}


def test_the_appendix_counts_the_rest() -> None:
    """Each pair may have a root instead, and each comp and dec another device."""
    total = one_device = 0
    for leaf in tree.espresso(1, roots=False):
        pairs = sum(op.divides for op in leaf.ops)
        one_device += 2**pairs
        total += 2 ** (pairs + 2 * leaf.compressions)
    assert (one_device, total) == (174, 4341)


def test_what_the_paper_forbids() -> None:
    added = {str(leaf) for leaf in tree.full()} - {str(leaf) for leaf in tree.espresso(1)}
    assert added == {"comp fARc dec", "iRS comp eARc dec iAG", "iR comp eARc dec iB"}
    assert all(tree.parse(text).summed for text in added)
    assert len(tree.full(2)) == 4341 + 3 * 4


def test_every_leaf_is_read_back() -> None:
    for leaf in tree.full(2):
        assert tree.parse(str(leaf)) == leaf


def test_letters() -> None:
    leaves = {str(leaf) for leaf in tree.espresso(1)}
    for letter, text in tree.NAMED.items():
        assert text in leaves
        assert str(tree.parse(letter)) == text
    assert list(tree.NAMED) == list("ABCDEFGHIJK")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("iRS comp eAGc dec", "not a leaf of the tree; the nearest is"),
        ("comp fAGc", "nearest is 'comp fAGc dec'"),
        ("comp fAGd dec", "'fAGd' is no operation"),
        ("Z", "'Z' is no operation; known letters: A, B"),
        ("", "not a leaf"),
        ("iRS eAR iB", "not a leaf"),
        ("comp@gpu fAGc dec", "'comp@gpu' is no operation"),
    ],
)
def test_what_is_no_leaf(text: str, why: str) -> None:
    with pytest.raises(ChainTextError, match=why):
        tree.parse(text)
