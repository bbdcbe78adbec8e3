"""Every number of every form of file has a range, and nonsense in its place is named or legal."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import inspect

import thinwire
from tests.hostile import nonsense, readers
from thinwire.codecs import CODECS
from thinwire.engine.journal import Journal
from thinwire.engine.layout import TensorInfo
from thinwire.errors import CodecTextError, JournalLine, StateError, ThinwireError
from thinwire.lab.leftovers import Record
from thinwire.report.runs import ResultError, Run, load, summarise

SOURCE = Path(thinwire.__file__).parent
WRITTEN_ONLY = (Journal, TensorInfo)
"""Structs that are never decoded."""


def structs() -> list[type[msgspec.Struct]]:
    """Those of all modules that have some."""
    for path in SOURCE.rglob("*.py"):
        if "msgspec.Struct" in path.read_text():
            importlib.import_module(".".join(("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)))
    found, todo = [], [msgspec.Struct]
    while todo:
        for kind in todo.pop().__subclasses__():
            todo.append(kind)
            if kind.__module__.startswith("thinwire.") and kind not in WRITTEN_ONLY:
                found.append(kind)
    return found


def without_range(kind: Any) -> bool:
    """Whether it holds a number without a least or a largest value; structs inside of it are looked at by themselves."""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
    parts = [getattr(kind, name, ()) for name in ("types", "item_types", "item_type", "key_type", "value_type")]
    return any(without_range(p) for part in parts for p in (part if isinstance(part, tuple) else (part,)))


def test_every_number_of_a_struct_has_a_range() -> None:
    kinds = structs()
    assert len(kinds) > 25
    bad = [
        f"{kind.__module__}.{kind.__name__}.{field.name}"
        for kind in kinds
        for field in inspect.type_info(kind).fields  # type: ignore[attr-defined]
        if without_range(field.type)
    ]
    assert not bad


def test_a_number_without_a_range_is_seen() -> None:
    for kind in (int, float, list[int], dict[str, float], tuple[int, str], tuple[float, ...], str | float | None):
        assert without_range(inspect.type_info(kind)), kind


def _try(form: nonsense.Form, place: nonsense.Place, text: str) -> bool:
    """Whether it is refused, by an error that says where."""
    try:
        form.read(text)
    except ThinwireError as error:
        if not nonsense.names(error, place):
            pytest.fail(f"{form.name}, {place}: {error!s:.300} for {text:.300}")
        return True
    except Exception as error:
        raise AssertionError(f"{form.name}, {place}: {error!r:.300} for {text:.2000}") from error
    return False


def _check(form: nonsense.Form, most: int | None) -> None:
    """Nonsense in every place, all of it or `most` pieces, others in each place."""
    found = list(nonsense.places(form.good))
    assert found, form.name
    refused = 0
    for count, place in enumerate(found):
        texts = nonsense.spoilt(form.good, place)
        chosen = texts if most is None else [texts[(count + i * 7) % len(texts)] for i in range(min(most, len(texts)))]
        refused += sum(_try(form, place, text) for text in chosen)
    assert refused > len(found), f"{form.name}: hardly anything was refused"


def test_nonsense_in_every_number(tmp_path: Path) -> None:
    for form in nonsense.forms(tmp_path):
        form.read(msgspec.json.encode(form.good).decode())
        _check(form, 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_nonsense_in_every_number(tmp_path: Path) -> None:
    for form in nonsense.forms(tmp_path):
        _check(form, None)


def arguments() -> list[tuple[str, str]]:
    """Every codec with each of its numbers."""
    return [
        (name, field.name)
        for name, kind in CODECS.items()
        for field in dataclasses.fields(kind)
        if kind.__module__.startswith("thinwire.")  # not those that other tests register
        if (isinstance(field.default, int | float) and not isinstance(field.default, bool)) or field.default is None
    ]


@pytest.mark.parametrize(("codec", "argument"), arguments())
def test_nonsense_in_every_argument_of_a_codec(codec: str, argument: str) -> None:
    """It is refused by name, or exchanges run with it."""
    values = [
        "-1",
        "0",
        "0.5",
        "1e-320",
        "1e308",
        "1e400",
        "True",
        "'x'",
        "[]",
        "None",
        str(2**31),
        str(2**63),
        "9" * 400,
    ]
    refused = 0
    for value in values:
        text = f"{codec}({argument}={value})"
        try:
            parsed = thinwire.parse(text)
        except CodecTextError as error:
            if argument not in str(error):
                pytest.fail(str(error))
            refused += 1
            continue
        exchange = thinwire.Exchange(readers._tensors(0), parsed, thinwire.LocalWorld(2), min_elements=64)
        for step in range(2):
            exchange.reduce_([readers._tensors(2 * step), readers._tensors(2 * step + 1)])
    assert refused >= 3


def test_borders_that_go_round_the_range_of_integers_do_not_ascend() -> None:
    exchange = thinwire.Exchange(readers._tensors(0), "micro(density=0.1)", thinwire.LocalWorld(4), min_elements=64)
    for _ in range(2):
        exchange.reduce_([readers._tensors(rank) for rank in range(4)])
    assert exchange.executor is not None
    state = next(run.way.state for run in exchange.executor.rank_states[0].groups if hasattr(run.way.state, "borders"))
    elements = int(state.borders[-1])
    state.check()
    state.borders = np.array([0, 2**62, -(2**63), -(2**62), elements], np.int64)
    with np.errstate(over="ignore"):
        assert (np.diff(state.borders) >= 0).all(), "differences do not show it"
    with pytest.raises(ValueError, match="borders must ascend"):
        state.check()


def test_files_of_ranks_that_no_job_has_are_not_taken(tmp_path: Path) -> None:
    exchange = thinwire.Exchange(readers._tensors(0), "topk(density=0.1)", thinwire.LocalWorld(2), min_elements=64)
    for name in ("rank0-of-0", "rank5-of-2", "rank999999999-of-1"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    with pytest.raises(StateError, match="holds no state"):
        exchange.load(tmp_path)


@pytest.mark.parametrize("name", ["id.1.²", "id.²1.3", "id.1." + "9" * 5000, "id.-1.3"])
def test_a_name_with_numbers_that_python_does_not_read_is_no_record(tmp_path: Path, name: str) -> None:
    assert Record.read(tmp_path / name) is None


@pytest.mark.parametrize("text", ["[" * 100_000, "[1, 2]", "7", "9" * 5000, '"x"'])
def test_a_record_of_nonsense_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "id.1.2").write_text(text)
    record = Record.read(tmp_path / "id.1.2")
    assert record is not None
    assert (record.identity, record.pid, record.start, record.about) == ("id", 1, 2, {})


def test_journals_and_results_nested_without_end_are_named(tmp_path: Path) -> None:
    for name, error in (("run.jsonl", JournalLine), ("results.json", ResultError)):
        (tmp_path / name).write_text('{"kind":' * 100_000 + "\n")
        with pytest.raises(error, match=name):
            load(tmp_path / name)


def test_losses_whose_sum_is_infinite_have_a_mean(tmp_path: Path) -> None:
    start, *lines = readers.journal_lines().decode().splitlines()
    notes = [json.dumps({"kind": "note", "step": n, "time": 0, "values": {"loss": 1.5e308}}) for n in range(10)]
    (tmp_path / "run.jsonl").write_text("\n".join([start, *lines, *notes, ""]))
    found = load(tmp_path / "run.jsonl")
    assert isinstance(found, Run)
    assert summarise(found)["loss"] == pytest.approx(1.5e308)
