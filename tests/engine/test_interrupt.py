"""Ctrl-C while a rank waits for one that never answers: the job ends by itself, and one is enough."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.engine.deserted import Ranks

WAYS = [
    "attach:dense",
    "attach:topk(density=0.05) via K",
    "exchange:micro(density=0.05)",
    "updates:randomblock(ratio=8)",
    "updates:topk(density=0.05)",
    "attach:topk(density=0.05)",
]


def test_one_interrupt_is_enough(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, "interrupt", *WAYS) as ranks:
        text, code = ranks.end_of(0)
    for way in WAYS:
        assert f"{way}: interrupted" in text, text
    for way in WAYS[:-1]:
        assert f"{way}: threads left: 0" in text, text
        assert f"{way}: closed by: interrupted" in text, text
        assert f"{way}: then: " in text, text
    assert text.count("pressed") == len(WAYS)
    assert code in (128 + signal.SIGINT, -signal.SIGINT), text


@pytest.mark.parametrize("way", ["attach:micro(density=0.05)", "attach:dense", "updates:randomblock(ratio=8)"])
def test_groups_that_can_close_do_not_abort_the_end(way: str, tmp_path: Path) -> None:
    """Several groups, of which one waits for a peer for ever while the others close as the interpreter ends."""
    with Ranks(2, tmp_path, "interrupt", way) as ranks:
        text, code = ranks.end_of(0)
    assert "KeyboardInterrupt" in text
    assert code in (128 + signal.SIGINT, -signal.SIGINT), text


def test_interrupt_before_the_others_have_come(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, "absent", "attach:topk(density=0.05)") as ranks:
        text, code = ranks.end_of(0)
    assert "KeyboardInterrupt" in text
    assert code in (128 + signal.SIGINT, -signal.SIGINT), text
