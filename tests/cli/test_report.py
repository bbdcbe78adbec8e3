"""`thinwire report` and `thinwire top`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import thinwire
from tests.report.chrome import validate
from tests.report.sample import HOSTILE
from thinwire.cli.app import app
from thinwire.engine import journal


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """What an exchange of two ranks in this process wrote."""
    tensors = [{"a": torch.randn(4000), "b": torch.randn(3000)} for _ in range(2)]
    exchange = thinwire.Exchange(tensors[0], "topk(density=0.1)", thinwire.LocalWorld(2))
    exchange.log_to(tmp_path / "one.jsonl", residual_every=1)
    exchange.trace(3)
    for _ in range(12):
        exchange.reduce_(tensors)
        exchange.note(loss=2.5)
    exchange.set(density=0.2)
    return tmp_path / "one.jsonl"


def _run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_page_trace_and_numbers(logged: Path, tmp_path: Path) -> None:
    code, text = _run("report", logged, "--out", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert (code, "a.html" in text) == (0, True)
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (row["codec"], row["ranks"], row["steps"], row["loss"]) == ("topk(density=0.1)", 2, 12, 2.5)
    code, text = _run("report", logged, "--trace", tmp_path / "t.json")
    assert (code, "3 traced steps" in text) == (0, True)
    validate(json.loads((tmp_path / "t.json").read_text()))


def test_one_frame(logged: Path, tmp_path: Path) -> None:
    code, text = _run("top", logged, "--once", "--json", tmp_path / "a.json")
    assert code == 0
    for words in (
        "topk(density=0.1)",
        "on 2 ranks",
        "step 12",
        "computing",
        "waiting",
        "loss 2.5",
        "of 10 %",
        "residual norm",
    ):
        assert words in text, words
    assert "settings: from the next step on topk(density=0.2)" in text
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["steps"] == 12
    assert _run("top", logged) == _run("top", logged, "--once"), "the same where nobody watches"


def test_names_do_not_move_the_cursor(logged: Path) -> None:
    with logged.open("ab") as file:
        file.write(journal.encode(journal.Event(12, 0.0, "warning", HOSTILE)) + b"\n")
    code, text = _run("top", logged)
    assert code == 0
    assert "\x1b" not in text
    assert "<img src=x" in text


@pytest.mark.parametrize("command", ["report", "top"])
def test_mistakes(command: str, tmp_path: Path, logged: Path) -> None:
    assert _run(command, tmp_path / "nowhere")[0] == 1
    assert "there is no run" in _run(command, tmp_path / "nowhere")[1]
    (tmp_path / "bad.jsonl").write_text("{}\n")
    code, text = _run(command, tmp_path / "bad.jsonl")
    assert code == 1
    assert "line 1" in text
    assert "Traceback" not in text
    (tmp_path / "empty.jsonl").write_text("")
    assert "nothing was written" in _run(command, tmp_path / "empty.jsonl")[1]


def test_a_trace_needs_traced_steps(tmp_path: Path) -> None:
    exchange = thinwire.Exchange({"a": torch.zeros(2000)}, "topk(density=0.1)", thinwire.LocalWorld(1))
    exchange.log_to(tmp_path / "a.jsonl")
    code, text = _run("report", tmp_path / "a.jsonl", "--trace", tmp_path / "t.json")
    assert code == 1
    assert "wire.trace(20)" in text
    code, text = _run("report", tmp_path / "a.jsonl", tmp_path / "a.jsonl", "--trace", tmp_path / "t.json")
    assert (code, "a trace shows one run" in text) == (1, True)
