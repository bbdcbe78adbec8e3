"""Kernels are compiled beside the training: who decides that they are there, and what becomes of the compiler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import run
from thinwire.auto.compiling import PERIOD, Compiling, state_of
from thinwire.comm.world import TorchWorld
from thinwire.engine.compiler import missing
from thinwire.kernels import cache


@pytest.mark.parametrize(
    ("ready", "in_time", "state"),
    [(1.0, 1.0, "ready"), (1.0, 0.0, "ready"), (0.0, 1.0, "compiling"), (0.0, 0.0, "late")],
)
def test_the_least_of_all_ranks_decides(ready: float, in_time: float, state: str) -> None:
    assert state_of(ready, in_time) == state


@contextlib.contextmanager
def _empty(folder: str) -> Iterator[None]:
    """With a cache in this folder. Ranks live on, so what they knew before is put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THINWIRE_CACHE_DIR", folder)
        cache.folder.cache_clear()
        yield
    cache.folder.cache_clear()


def _until_decided(folder: str, texts: list[str]) -> tuple[bool, list[str], list[str]]:
    """With an empty cache: whether it was ready at once, every state after that, and what is missing in the end."""
    with _empty(folder):
        compiling = Compiling(TorchWorld(None, 1), texts, longest=math.inf)
        at_once, states = compiling.begin(), ["compiling"]
        while states[-1] == "compiling":
            states.append(compiling.step())
        compiling.close()
        return at_once, states, missing(texts)


def test_ranks_go_on_together_once_a_child_has_compiled(tmp_path: Path) -> None:
    first, second = run(2, _until_decided, str(tmp_path), ["dense"])
    assert first == second
    at_once, states, absent = first
    assert (at_once, states[-1], absent) == (False, "ready", [])
    assert (len(states) - 1) % PERIOD == 0


def test_a_compiler_that_fails_ends_the_waiting_of_all_ranks(tmp_path: Path) -> None:
    first, second = run(2, _until_decided, str(tmp_path), ["nosuchcodec"])
    assert first == second
    assert first[1][-1] == "late"
    assert first[2] == ["nosuchcodec"]
