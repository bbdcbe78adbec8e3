"""The journal: what is written while a job runs, and how it is read again."""

from __future__ import annotations

import json
import logging
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import thinwire
from tests.models import batch, digest, train, wrapped
from tests.ranks import run
from thinwire.engine import journal
from thinwire.errors import ExchangeError, JournalEmpty, JournalError, JournalLine, JournalVersion
from thinwire.report.timeline import coverage, exchange, waits

GOOD = b'{"kind":"start","version":1,"time":1,"rank":0,"world":2,"codec":"topk","thinwire":"0","torch":"2","host":"h"}'


def _job(folder: str) -> tuple[dict[str, Any], int]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "topk(density=0.05)", min_elements=100)
    wire.guard(optimizer := torch.optim.SGD(ddp.parameters(), lr=0.1))
    wire.log_to(folder, residual_every=4)
    losses = train(ddp, optimizer, range(8), each=lambda step: wire.note(loss=float(step)))
    assert len(losses) == 8
    wire.set(density=0.1)
    wire.trace(3)
    train(ddp, optimizer, range(8, 12))
    inputs, _ = batch(12, 0)
    ddp(inputs * float("nan")).sum().backward()
    optimizer.step()
    stats = wire.stats()
    wire.close()
    return stats, wire.steps


def test_what_a_job_writes(tmp_path: Path) -> None:
    results = run(2, _job, str(tmp_path / "run"))
    paths = journal.files(tmp_path / "run")
    assert [path.name for path in paths] == ["rank-0.jsonl", "rank-1.jsonl"]
    for rank, (path, (stats, done)) in enumerate(zip(paths, results, strict=True)):
        found = journal.read(path)
        assert (found.start.rank, found.start.world, found.start.codec) == (rank, 2, "topk(density=0.05)")
        assert [step.step for step in found.steps] == list(range(1, done + 1)) == list(range(1, 14))
        assert [step.path for step in found.steps[:4]] == ["dense", "dense", "layout", "layout"]
        for step in found.steps[1:]:
            assert step.seconds == pytest.approx(step.compute + step.exposed, abs=1e-6)
            assert 0.0 <= step.wire <= step.seconds
        assert sum(step.bytes or 0 for step in found.steps[2:]) == stats["bytes_per_step"] * stats["steps"]
        link_bytes = sum(step.link_bytes or 0.0 for step in found.steps[2:])
        assert link_bytes == pytest.approx(stats["link_bytes_per_step"] * stats["steps"])
        assert [step.link_bytes for step in found.steps] == [step.bytes for step in found.steps], "of two ranks"
        assert [step.step for step in found.steps if step.residual_norm is not None] == [4, 8, 12]
        assert [step.target for step in found.steps[2:]] == pytest.approx([0.05] * 6 + [0.1] * 5)
        assert found.steps[5].density == pytest.approx(0.05, rel=0.3)
        assert [step.step for step in found.steps if step.skipped] == [13]
        assert [event.what for event in found.events] == ["settings", "skipped", "closed"]
        assert [note.values["loss"] for note in found.notes] == list(range(8))
        assert [note.step for note in found.notes] == list(range(1, 9))
        (layout,) = found.layouts
        assert len(layout.groups) == len(found.steps[-1].groups) == len(stats["groups"])
        for group, mean in zip(layout.groups, stats["groups"], strict=True):
            assert (group.name, group.elements) == (mean["name"], mean["elements"])


def test_a_trace_names_what_it_spends_its_time_on(tmp_path: Path) -> None:
    run(2, _job, str(tmp_path / "run"))
    for path in journal.files(tmp_path / "run"):
        traces = journal.read(path).traces
        assert sorted(traces) == [9, 10, 11]
        for trace in traces.values():
            job = [span for span in trace.spans if span.lane == "job"]
            assert {"forward", "backward", "waiting for the exchange"} <= {span.name for span in job}
            assert trace.step == 9 or "optimizer" in {span.name for span in job}
            assert job[0].start == 0.0
            assert job[-1].end == pytest.approx(trace.seconds)
            assert all(a.end == pytest.approx(b.start) for a, b in pairwise(job)), "no hole"
            inside = exchange(trace)
            for span in (*trace.spans, *waits(trace)):
                assert 0.0 <= span.start <= span.end <= trace.seconds + 1e-6
                assert span.lane == "job" or span.start >= inside.start
            thread = sorted((s for s in (*trace.spans, *waits(trace)) if s.lane == "thread"), key=lambda s: s.start)
            assert all(a.end <= b.start + 2e-7 for a, b in pairwise(thread)), "one at a time"
            assert {group for arrival in trace.arrivals for group in arrival.groups} == set(
                range(len({span.group for span in trace.spans if span.name == "encode"}))
            )
        assert sorted(map(coverage, traces.values()))[1] >= 0.8


def _digests(folder: str | None) -> str:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "micro(density=0.05)", min_elements=100)
    if folder is not None:
        wire.log_to(folder, residual_every=1)
        wire.trace(5)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(8))
    return digest(ddp)


def test_a_log_changes_no_bit(tmp_path: Path) -> None:
    assert run(2, _digests, None) == run(2, _digests, str(tmp_path))


# -- where it goes -----------------------------------------------------------------------------------------------------


def _exchange() -> tuple[thinwire.Exchange, list[dict[str, torch.Tensor]]]:
    tensors = [{"a": torch.randn(4000), "b": torch.randn(3000)} for _ in range(2)]
    return thinwire.Exchange(tensors[0], "topk(density=0.1)", thinwire.LocalWorld(2)), tensors


class Board:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_file_board_and_function_hear_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire, tensors = _exchange()
    board, lines = Board(), list[dict[str, Any]]()
    wire.log_to(tmp_path / "a.jsonl")
    wire.log_to(board)
    with caplog.at_level(logging.INFO, "thinwire"):
        logging.getLogger("thinwire").addHandler(caplog.handler)
        wire.log_to(lambda line: lines.append(json.loads(json.dumps(line))), summary=3, residual_every=2)
        for _ in range(6):
            wire.reduce_(tensors)
        logging.getLogger("thinwire").removeHandler(caplog.handler)
    written = [json.loads(text) for text in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line for line in written if line["kind"] == "step"] == [line for line in lines if line["kind"] == "step"]
    assert {line["kind"] for line in lines} == {"start", "layout", "step"}
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    for tag, value, step in board.scalars:
        assert steps[step][tag.removeprefix("thinwire/")] == value
    assert {tag for tag, _, _ in board.scalars} >= {"thinwire/seconds", "thinwire/bytes", "thinwire/residual_norm"}
    said = [record.getMessage() for record in caplog.records]
    assert list(dict.fromkeys(text.split(":")[0] for text in said)) == ["step 3", "step 6"]


def test_a_log_that_fails_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wire, tensors = _exchange()

    def full(line: dict[str, Any]) -> None:
        if line["kind"] == "step":
            raise OSError("no space left on device")

    logging.getLogger("thinwire").addHandler(caplog.handler)
    wire.log_to(full)
    wire.log_to(tmp_path / "a.jsonl")
    for _ in range(3):
        wire.reduce_(tensors)
    logging.getLogger("thinwire").removeHandler(caplog.handler)
    assert "no space left on device" in caplog.text
    assert len(journal.read(tmp_path / "a.jsonl").steps) == 3, "the other one goes on"


def test_mistakes_are_refused(tmp_path: Path) -> None:
    wire, _ = _exchange()
    with pytest.raises(TypeError, match="a path, an object with add_scalar"):
        wire.log_to(3)
    with pytest.raises(ValueError, match="every must be a whole number from 1"):
        wire.log_to(tmp_path / "a.jsonl", every=0)
    with pytest.raises(ExchangeError, match="log_to"):
        wire.trace(2)
    wire.log_to(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="steps must be"):
        wire.trace(0)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"", JournalEmpty, "nothing was written"),
        (b'{"kind":"step","step":1,"time":0}\n', JournalLine, "line 1: a journal begins with"),
        (GOOD.replace(b'"version":1', b'"version":2') + b"\n", JournalVersion, "version 2, this thinwire reads 1"),
        (b'{"kind":"start","version":7,"new":"form"}\n', JournalVersion, "version 7"),
        (GOOD + b"\nnot json\n", JournalLine, "line 2"),
        (GOOD + b'\n{"kind":"step","time":0}\n', JournalLine, "line 2: .*step"),
        (GOOD + b'\n\n{"kind":"step","step":"x","time":0}\n', JournalLine, r"line 3: .*\$.step"),
        (GOOD + b'\n{"kind":"gossip"}\n', JournalLine, "gossip"),
        (GOOD + b'\n{"kind":"note","step":1,"time":0,"values":{"loss":"low"}}\n', JournalLine, r"values"),
        (GOOD + b'\n{"kind":"event","step":1,"time":0,"what":"x","text":"\xff"}\n', JournalLine, "line 2"),
        (GOOD + b"\n[]\n", JournalLine, "line 2"),
    ],
)
def test_malformed_lines_have_named_errors(tmp_path: Path, content: bytes, kind: type, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(kind, match=says) as caught:
        journal.read(path)
    assert isinstance(caught.value, JournalError)
    assert str(path) in str(caught.value)


def test_a_missing_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalEmpty, match="there is no run"):
        journal.files(tmp_path / "nowhere")
    with pytest.raises(JournalEmpty, match=r"no \.jsonl file"):
        journal.files(tmp_path)


def test_a_line_that_is_half_written_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD + b'\n{"kind":"step","st')
    reader = journal.Reader(path)
    assert [type(line) for line in reader.read()] == [journal.Start]
    assert list(reader.read()) == []
    with path.open("ab") as file:
        file.write(b'ep":4,"time":0}\n')
    (line,) = reader.read()
    assert isinstance(line, journal.Step)
    assert line.step == 4


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    wire, _ = _exchange()
    wire.log_to(tmp_path / "a.jsonl")
    wire.note(loss=math.nan)
    assert journal.read(tmp_path / "a.jsonl").notes[0].values == {"loss": None}


def test_every_kind_comes_back_as_it_was() -> None:
    group = journal.GroupLine("g", "topk", "", 10, ("a",), "float32", 4.0)
    lines: list[journal.Line] = [
        msgspec.json.decode(GOOD, type=journal.Start),
        journal.Layout(1, 2.0, "topk", (group,)),
        journal.Step(1, 2.0, 0.5, groups=(journal.GroupStep(0.1, 0.2, 0.3, 4, 5),)),
        journal.Event(1, 2.0, "skipped", "text"),
        journal.Note(1, 2.0, {"loss": 1.5}),
        journal.Trace(1, 2.0, 0.5, (journal.Span("wire", "x", 0, 0.0, 0.1),), (journal.Arrival(0.1, 2, "a", (0,)),)),
    ]
    for line in lines:
        assert msgspec.json.decode(journal.encode(line), type=journal.Line) == line
