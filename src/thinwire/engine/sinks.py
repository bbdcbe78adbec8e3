"""Targets of the journal: files, TensorBoard, a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from . import journal
from .recorder import Sink


class JsonLines:
    """A file that grows by one line at a time, each written at once: nothing is lost with a job that is killed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def __call__(self, line: journal.Line) -> None:
        self._file.write(journal.encode(line) + b"\n")


def to_board(writer: Any) -> Sink:
    """Scalars for an object with `add_scalar`, as TensorBoard's SummaryWriter has it."""
    names = ("seconds", "compute", "exposed", "encode", "wire", "decode", "bytes", "density", "residual_norm")

    def write(line: journal.Line) -> None:
        if isinstance(line, journal.Step):
            for name in names:
                value = getattr(line, name)
                if value is not None:
                    writer.add_scalar(f"thinwire/{name}", value, line.step)
        elif isinstance(line, journal.Event) and hasattr(writer, "add_text"):
            writer.add_text(f"thinwire/{line.what}", line.text, line.step)

    return write


def make_sink(target: Any, rank: int) -> Sink | None:
    """What `log_to` was given, as something that takes lines; None where another rank writes."""
    if isinstance(target, str | Path):
        path = Path(target)
        if path.suffix == ".jsonl" and not path.is_dir():
            return JsonLines(path) if rank == 0 else None
        return JsonLines(path / f"rank-{rank}.jsonl")
    if hasattr(target, "add_scalar"):
        return to_board(target) if rank == 0 else None
    if callable(target):
        return lambda line: target(msgspec.to_builtins(line))  # as it would stand in a file
    raise TypeError(
        f"log_to takes a path, an object with add_scalar such as a SummaryWriter, or a function, not {type(target).__name__}"
    )
