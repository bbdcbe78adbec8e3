"""What stands in a page, without a browser."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import torch

import thinwire
from tests.report.sample import HOSTILE, STEPS, TRACED
from thinwire.engine import journal
from thinwire.errors import JournalError
from thinwire.report.content import POINTS, content
from thinwire.report.page import embed, page
from thinwire.report.runs import Run, load, settled, summarise, typical


def test_nothing_in_the_data_ends_the_script() -> None:
    for attack in (HOSTILE, "<!--<script>", "]]>", "&lt;", "\u2028"):
        text = embed({"name": attack, attack: [attack]})
        assert not re.search("[<>&\u2028]", text)
        assert json.loads(text) == {"name": attack, attack: [attack]}


def test_the_page_asks_nobody(real_run: Path) -> None:
    text = page([load(real_run)])
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=(?![\"']?data:)", text)
    assert "Permission is hereby granted" in text, "the licence of what it contains"
    assert text.count("</script>") == 3


def test_the_bundled_library_is_what_the_page_says() -> None:
    folder = resources.files("thinwire.report").joinpath("vendor")
    version = re.search(r"\(v([\d.]+)\)", folder.joinpath("uPlot.iife.min.js").read_text())
    assert version is not None
    for place in (folder.joinpath("README.md"), resources.files("thinwire.report").joinpath("page.py")):
        assert f"uPlot {version[1]}" in place.read_text()
    for name in ("uPlot.iife.min.js", "../page.js"):
        assert not re.search("</script|<!--", folder.joinpath(name).read_text(), re.IGNORECASE)


def test_what_a_page_shows(real_run: Path) -> None:
    run = load(real_run)
    assert isinstance(run, Run)
    shown = json.loads(json.dumps(content([run]), allow_nan=False))["runs"][0]
    assert shown["name"] == "planned"
    assert len(shown["columns"]["step"]) == STEPS
    assert len(shown["traces"]) == TRACED
    assert [group["codec"] for group in shown["groups"]] == ["topk", "dense", "dense"]
    assert [bool(group["predicted"]) for group in shown["groups"]] == [True, True, False]
    topk, dense = shown["groups"][0], next(g for g in shown["groups"] if "0.weight" in g["tensors"])
    assert topk["predicted"] == pytest.approx({"encode": 0.002, "wire": 0.005, "decode": 0.001})
    assert dense["predicted"] == pytest.approx({"encode": 0.001, "wire": 0.006, "decode": 0.001})
    assert "gains nothing" in dense["why"]
    assert topk["density"] == pytest.approx(0.01, rel=0.3)
    assert {span[0] for span in shown["predicted"]} <= {0, 1, 2}
    assert shown["plan"]["remarks"] == ["made by hand"]
    assert shown["notes"]["loss"]["step"] == list(range(1, STEPS + 1))
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    for trace in shown["traces"]:
        backward = [span for span in trace["spans"] if span[1] == "backward"]
        assert backward[0][3] == 0.0, "time is counted from there"


def test_a_summary_adds_up(real_run: Path) -> None:
    run = load(real_run)
    assert isinstance(run, Run)
    row = summarise(run)
    assert row["seconds"] == pytest.approx(row["compute"] + row["exposed"], abs=1e-5)
    assert row["steps"] == STEPS
    assert row["loss"] > 0
    assert row["bytes"] == row["link_bytes"] < 0.3 * row["dense_bytes"], "two ranks send what they hand over"


def test_which_steps_count() -> None:
    steps = [journal.Step(n, 0.0, float(n), path="dense" if n < 3 else "layout") for n in range(1, 41)]
    assert [step.step for step in settled(steps)] == list(range(6, 41))
    assert [step.step for step in settled(steps[:2])] == [2]
    assert settled([]) == []
    assert [step.step for step in typical(steps[:8])] == [3, 4, 5, 6]


def test_a_long_run_is_shown_by_means(tmp_path: Path) -> None:
    exchange = thinwire.Exchange({"a": torch.zeros(2000)}, "topk(density=0.1)", thinwire.LocalWorld(1))
    exchange.log_to(tmp_path / "long.jsonl")
    lines = [journal.Step(n, float(n), 1.0 + n % 2, bytes=n) for n in range(1, 3 * POINTS + 1)]
    with (tmp_path / "long.jsonl").open("ab") as file:
        file.writelines(journal.encode(line) + b"\n" for line in lines)
    shown = content([load(tmp_path / "long.jsonl")])["runs"][0]
    assert shown["binned"]
    assert len(shown["columns"]["step"]) == POINTS
    assert shown["columns"]["bytes"][:2] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a result file"),
        ("[]", "not a result file"),
        ('{"command": "simulate", "rows": [{"model": "x"}]}', "results of 'simulate' have no method"),
        ('{"command": "bench step", "rows": []}', "have no method"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(JournalError, match=says):
        load(tmp_path / "x.json")
