"""Targets of the journal: files, TensorBoard, a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from . import journal
from .recorder import JsonLines, Sink


def to_board(writer: Any) -> Sink:
    """Scalars for an object with `add_scalar`, as TensorBoard's SummaryWriter has it."""
    times = ("seconds", "compute", "exposed", "encode", "wire", "decode")
    names = (*times, "bytes", "link_bytes", "density", "residual_norm")

    def write(line: journal.Line) -> None:
        if isinstance(line, journal.Step):
            for name in names:
                value = getattr(line, name)
                if value is not None:
                    writer.add_scalar(f"thinwire/{name}", value, line.step)
        elif isinstance(line, journal.Event) and hasattr(writer, "add_text"):
            writer.add_text(f"thinwire/{line.what}", line.text, line.step)

    return write


def to_callable(function: Callable[[dict[str, Any]], object]) -> Sink:
    """Each line as a dict, as it would stand in the file."""

    def write(line: journal.Line) -> None:
        function(msgspec.to_builtins(line))

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
        return to_callable(target)
    raise TypeError(
        f"log_to takes a path, an object with add_scalar such as a SummaryWriter, or a function, not {type(target).__name__}"
    )
