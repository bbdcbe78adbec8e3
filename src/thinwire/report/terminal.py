"""The live view of a running job in a terminal: step time by phase, traffic, groups, events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..engine.journal import Journal, Reader, files
from .runs import Run, settled, summarise

LAST = 50
"""Number of latest steps that are averaged; for times, the half of them with typical length."""
SHADES = {"compute": "magenta", "exposed": "red", "encode": "yellow", "wire": "blue", "decode": "green"}
WORDS = {"compute": "computing", "exposed": "waiting", "encode": "encode", "wire": "wire", "decode": "decode"}


class Watched:
    """The journal of the lowest rank of a run, followed while it is being written."""

    def __init__(self, run: Path) -> None:
        self.path = files(run)[0]
        self._reader = Reader(self.path)
        self.journal = Journal(str(self.path))
        self.run = Run(run.stem if run.is_file() else run.resolve().name, [self.journal])

    def update(self) -> None:
        for line in self._reader.read():
            self.journal.add(line)
        # Jobs may run for weeks: keep only what is shown.
        for step in sorted(self.journal.by_step)[: -4 * LAST]:
            del self.journal.by_step[step]
        del self.journal.notes[: -4 * LAST], self.journal.events[: -4 * LAST]
        self.journal.traces.clear()
        self.journal.fits.clear()


def frame(run: Run, most: int) -> RenderableType:
    """The content of the terminal, with at most `most` groups."""
    found, row = run.first, summarise(run, LAST)
    if not found.by_step:
        return Text(f"{_clean(run.name)}: {_clean(found.start.codec)} on {found.start.world} ranks, no step yet")
    last = found.steps[-1]
    ago = max(0.0, time.time() - last.time)
    head = Text.assemble(
        (_clean(run.name), "bold"), f"  {_clean(row['codec'])} on {row['ranks']} ranks, ", (f"step {last.step}", "bold"),
        f", {_ago(ago)} ago" + (f", loss {row['loss']:.4g}" if row["loss"] is not None else ""),
    )  # fmt: skip
    return Group(head, Text(), _split(row), Text(_sent(row)), *_groups(found, most), *_events(found))


def _split(row: dict[str, Any]) -> Table:
    """Step time, and a bar per phase."""
    table = Table.grid(padding=(0, 2))
    seconds = row["seconds"] or 0.0
    table.add_row("step", f"{1000 * seconds:.1f} ms", "")
    for name, shade in SHADES.items():
        value = row[name]
        if value is None:
            continue
        share = value / seconds if seconds else 0.0
        note = "  (overlaps with computing if possible)" if name == "encode" else ""
        bar = Text("█" * round(40 * min(1.0, share)), style=shade)
        table.add_row(f"  {WORDS[name]}", f"{1000 * value:.1f} ms", Text.assemble(bar, f" {100 * share:.0f} %{note}"))
    return table


def _sent(row: dict[str, Any]) -> str:
    parts = []
    if row["link_bytes"] is not None:
        parts.append(f"{row['link_bytes'] / 1e6:.3f} MB per step on the link")
        if row["dense_bytes"]:
            parts[-1] += f" ({row['dense_bytes'] / max(row['link_bytes'], 1):.1f} times less than dense)"
    elif row["bytes"] is not None:
        parts.append(f"hands over {row['bytes'] / 1e6:.3f} MB per step")
    if row["density"] is not None:
        asked = f" of {100 * row['target']:.3g} %" if row["target"] is not None else ""
        parts.append(f"density {100 * row['density']:.3g} %{asked}")
    if row["residual_norm"] is not None:
        parts.append(f"residual norm {row['residual_norm']:.4g}")
    if row["skipped"]:
        parts.append(f"{row['skipped']} steps void")
    return "\n" + ", ".join(parts) if parts else ""


def _groups(found: Journal, most: int) -> list[RenderableType]:
    groups = found.layouts[-1].groups if found.layouts else ()
    steps = [step for step in settled(found.steps) if len(step.groups) == len(groups)][-LAST:]
    if not groups or not steps or not most:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for title in ("group", "codec", "elements", "encode", "wire", "decode", "KB handed over"):
        table.add_column(title, justify="left" if title in ("group", "codec") else "right")
    sums = [
        [
            sum(getattr(step.groups[at], name) for step in steps) / len(steps)
            for name in ("encode", "wire", "decode", "bytes")
        ]
        for at in range(len(groups))
    ]
    for at in sorted(range(len(groups)), key=lambda at: -sums[at][1])[:most]:
        group, (encode, wire, decode, size) = groups[at], sums[at]
        codec = f"{group.codec} via {group.chain}" if group.chain else group.codec
        times = [f"{1000 * value:.2f} ms" for value in (encode, wire, decode)]
        table.add_row(_text(group.name), _text(codec), f"{group.elements:,}", *times, f"{size / 1e3:.1f}")
    hidden = len(groups) - most
    return [Text(), table, *([Text(f"and {hidden} more groups", style="dim")] if hidden > 0 else [])]


def _events(found: Journal) -> list[RenderableType]:
    if not found.events:
        return []
    lines = [_clean(f"step {event.step}: {event.what}: {event.text}".splitlines()[0]) for event in found.events[-5:]]
    return [Text(), Text("\n".join(lines), style="yellow")]


def _ago(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _clean(text: str) -> str:
    """Names from a file must not contain control characters."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def _text(text: str) -> Text:
    return Text(_clean(text), overflow="fold")
