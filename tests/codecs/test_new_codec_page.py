"""The complete example of docs/new-codec.md, as it stands there, obeys the laws."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.codecs import laws
from thinwire.codecs import CODECS, Codec, parse

PAGE = Path(__file__).parents[2] / "docs" / "new-codec.md"


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    module = types.ModuleType("blocktop_of_the_page")
    sys.modules[module.__name__] = module
    exec(compile(_blocks()[0], str(PAGE), "exec"), module.__dict__)
    yield module
    CODECS.pop("blocktop", None)
    del sys.modules[module.__name__]


def test_it_is_about_fifty_lines(example: Any) -> None:
    source = _blocks()[0]
    written = [line for line in source[source.index("@dataclass") :].splitlines() if line.strip()]
    assert len(written) <= 50


@pytest.mark.parametrize("block", [1, 7, 100, 5000])
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_conserves(example: Any, block: int, ranks: int) -> None:
    codec: Codec = example.BlockTop(block)
    shapes = {"a": (30, 40), "b": (40,), "c": (0, 2), "d": (1,)}
    for least in (0, 50):
        laws.check_steps(codec, shapes, ranks, ["normal", "heavy", "mostly zero", "normal"], block, least)
    laws.check_nothing(codec, shapes, ranks)
    laws.check_text(codec)


def test_its_estimate(example: Any) -> None:
    laws.check_estimate(example.BlockTop(), 2)


def test_it_is_known_by_its_text(example: Any) -> None:
    assert parse("blocktop(block=50)") == example.BlockTop(50)
    exchange = thinwire.Exchange({"a": torch.empty(5000)}, "blocktop(block=50)", thinwire.LocalWorld(2))
    given = [{"a": torch.randn(5000)} for _ in range(2)]
    exchange.reduce_(given)
    assert exchange.executor is not None
    assert exchange.executor.rank_states[0].groups[0].way.entries == 100


def test_a_void_step_loses_nothing(example: Any) -> None:
    exchange = thinwire.Exchange({"a": torch.empty(5000)}, example.BlockTop(50), thinwire.LocalWorld(2))
    exchange.reduce_([{"a": torch.randn(5000)} for _ in range(2)])
    before = laws.residuals(exchange)
    given = [{"a": torch.ones(5000)}, {"a": torch.ones(5000)}]
    given[1]["a"][4999] = float("inf")
    exchange.reduce_(given)
    assert exchange.skipped_last_step
    after = laws.residuals(exchange)
    assert torch.allclose(after[0]["a"], before[0]["a"] + 1.0, atol=1e-6), "the gradient waits"
    assert bool(torch.isfinite(after[1]["a"]).all())


def test_the_laws_of_the_page_run(example: Any) -> None:
    exec(compile(_blocks()[-1], str(PAGE), "exec"), {"BlockTop": example.BlockTop})
