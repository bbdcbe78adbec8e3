"""Loads and summarises runs (journals) and benchmark results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .. import traffic
from ..engine import journal
from ..engine.journal import Journal, Step
from ..errors import JournalError
from ..ranges import Amount

SECONDS = ("seconds", "compute", "exposed", "encode", "wire", "decode")


class ResultError(JournalError):
    """A file that is not a result file, or of a command that reports cannot show."""


@dataclass
class Run:
    """One job: the journals of its ranks, in rank order."""

    name: str
    journals: list[Journal]

    @property
    def first(self) -> Journal:
        """The journal of rank 0, or of the lowest rank that wrote one."""
        return self.journals[0]


class Results(msgspec.Struct):
    """A result file, written by a `bench` command with `--json`."""

    command: str
    rows: list[dict[str, Any]]
    machine: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    name: str = ""


def load(path: str | Path) -> Run | Results:
    """Load a run (file or folder written by `wire.log_to`), or a result file of `bench step`."""
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        return _results(path)
    journals = sorted((journal.read(file) for file in journal.files(path)), key=lambda found: found.start.rank)
    return Run(path.stem if path.is_file() else path.resolve().name, journals)


def _results(path: Path) -> Results:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path}: not a result file of thinwire: {error}") from None
    needed = ("method", "rate", "seconds")
    if not found.rows or any(name not in row for row in found.rows for name in needed):
        raise ResultError(
            f"{path}: results of {found.command!r} have no {', '.join(needed)}; `bench step` writes them"
        )
    for number, row in enumerate(found.rows):
        try:
            msgspec.convert(row["seconds"], Amount)
        except msgspec.ValidationError as error:
            raise ResultError(f"{path}: rows[{number}].seconds: {error}") from None
    found.name = path.stem
    return found


def settled(steps: Sequence[Step]) -> list[Step]:
    """Without the start of the run: dense steps before compressed ones, and first steps, which allocate buffers."""
    timed = [step for step in steps if step.seconds is not None]
    compressed = [step for step in timed if step.path == "layout"]
    chosen = compressed or timed
    return chosen[min(max(3, len(chosen) // 10), max(0, len(chosen) - 1)) :]


def typical(steps: Sequence[Step]) -> list[Step]:
    """The middle half by step time: its means are robust against a few slow steps, and phases still add up."""
    ordered = sorted(steps, key=lambda step: step.seconds or 0.0)
    return ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]


def mean(steps: Sequence[Step], name: str) -> float | None:
    known = [float(value) for step in steps if (value := getattr(step, name)) is not None]
    return statistics.fmean(known) if known else None


def summarise(run: Run, last: int | None = None) -> dict[str, Any]:
    """One flat row per run: means over typical steps, optionally of the `last` steps only."""
    found = run.first
    steps = settled(found.steps)[-last:] if last else settled(found.steps)
    elements = sum(group.elements for group in found.layouts[-1].groups) if found.layouts else None
    losses = [loss for note in found.notes if (loss := note.values.get("loss")) is not None][-10:]
    # Each loss is divided first, because the sum of those of a job that diverges may be infinite.
    return {
        "run": run.name,
        "codec": found.layouts[-1].codec if found.layouts else found.start.codec,
        "ranks": found.start.world,
        "steps": max(found.by_step, default=0),
        **{name: mean(typical(steps), name) for name in SECONDS},
        "bytes": mean(steps, "bytes"),
        "link_bytes": mean(steps, "link_bytes"),
        "dense_bytes": traffic.dense(elements, found.start.world) if elements is not None else None,
        "density": mean(steps, "density"),
        "target": mean(steps[-1:], "target"),
        "residual_norm": next((s.residual_norm for s in reversed(found.steps) if s.residual_norm is not None), None),
        "skipped": sum(step.skipped for step in found.steps),
        "loss": sum(loss / len(losses) for loss in losses) if losses else None,
    }
