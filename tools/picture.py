"""Draws the picture of README.md from the result of `thinwire demo`: loss over time of both runs, light and dark.

python tools/picture.py              # results/demo.json into docs/demo-light.svg and docs/demo-dark.svg (`make tables`)
python tools/picture.py RESULT LIGHT DARK
python tools/picture.py --check      # only say which picture is stale
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 860, 380
LEFT, RIGHT, TOP, BOTTOM = 58, 28, 84, 46
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


class Theme(NamedTuple):
    """Colours on a page of this kind; the picture's own background is transparent."""

    ink: str
    faint: str
    rule: str
    plain: str
    thinwire: str


THEMES = {
    "light": Theme("#1c2330", "#59636e", "#d9dee6", "#59636e", "#c2410c"),
    "dark": Theme("#e6e9ef", "#9aa4b2", "#333c49", "#9aa4b2", "#f5a04a"),
}

Point = tuple[float, float]


def nice(largest: float, about: int) -> Iterator[float]:
    """Round numbers from 0 to `largest`, `about` so many."""
    raw = largest / about
    power = 10.0 ** (len(str(int(raw))) - 1) if raw >= 1 else 0.1
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= raw)
    for number in range(int(largest / step) + 1):
        yield number * step


def draw(result: Mapping[str, Any], theme: Theme) -> str:
    """The whole SVG."""
    plain, ours = result["rows"]
    curves: list[list[Point]] = [
        list(zip(curve["seconds"], curve["loss"], strict=True)) for curve in result["summary"]["curves"]
    ]
    longest = max(points[-1][0] for points in curves)
    highest = max(loss for points in curves for _, loss in points) * 1.05

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / longest

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / highest

    title = result["summary"]["headline"]
    about = (
        f"Loss over time of {plain['steps']} steps on {plain['nodes']} nodes, {plain['rate']}: plain DDP takes "
        f"{plain['total_seconds']:.0f} s, thinwire {ours['total_seconds']:.0f} s."
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(about)}</desc>",
        _text(LEFT - 34, 30, title, theme.ink, 21, weight=600),
        _text(
            LEFT - 34, 54, f"{plain['nodes']} nodes, {_rate(plain['rate'])}, {plain['steps']} steps", theme.faint, 14
        ),
    ]
    for loss in nice(highest, 6):
        parts.append(_line(LEFT, y(loss), WIDTH - RIGHT, y(loss), theme.rule))
        parts.append(_text(LEFT - 8, y(loss) + 4, f"{loss:g}", theme.faint, 13, "end"))
    for seconds in nice(longest, 8):
        parts.append(_text(x(seconds), HEIGHT - BOTTOM + 20, f"{seconds:g} s", theme.faint, 13, "middle"))
    parts.append(_text(LEFT - 34, TOP - 10, "loss", theme.faint, 13))
    for points, row, colour in zip(curves, (plain, ours), (theme.plain, theme.thinwire), strict=True):
        path = " ".join(f"{x(seconds):.1f},{y(loss):.1f}" for seconds, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.6"/>')
        at, end = x(points[-1][0]), y(points[-1][1])
        parts.append(f'<circle cx="{at:.1f}" cy="{end:.1f}" r="4.5" fill="{colour}"/>')
        label = f"{row['label']}: {row['total_seconds']:.0f} s, loss {row['loss']:.2f}"
        near_end = at > WIDTH - 260
        below = row is ours
        parts.append(
            _text(at, end + (24 if below else -14), label, colour, 15, "end" if near_end else "start", weight=600)
        )
    return "\n".join([*parts, "</svg>", ""])


def _rate(rate: str) -> str:
    for short, spelled in (("gbit", "Gbit/s"), ("mbit", "Mbit/s"), ("kbit", "kbit/s")):
        if rate.endswith(short):
            return f"{rate.removesuffix(short)} {spelled}"
    return "links not shaped"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "start", weight: int = 400) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw the picture of README.md from the result of `thinwire demo`.")
    parser.add_argument("result", nargs="?", type=Path, default=ROOT / "results" / "demo.json")
    parser.add_argument("light", nargs="?", type=Path, default=ROOT / "docs" / "demo-light.svg")
    parser.add_argument("dark", nargs="?", type=Path, default=ROOT / "docs" / "demo-dark.svg")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a picture is stale")
    options = parser.parse_args(arguments)
    result = json.loads(options.result.read_text())
    stale = []
    for path, name in ((options.light, "light"), (options.dark, "dark")):
        text = draw(result, THEMES[name])
        if not path.is_file() or path.read_text() != text:
            stale.append(path.name)
            if not options.check:
                path.write_text(text)
    if stale:
        print("stale, run make tables:" if options.check else "drawn:", ", ".join(stale))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
