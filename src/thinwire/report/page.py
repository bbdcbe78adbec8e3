"""Self-contained HTML report pages: data, charts and styles in one file, without network access."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from .content import content
from .runs import Results, Run


def write(path: str | Path, given: Sequence[Run | Results], said: Sequence[str] | None = None) -> None:
    Path(path).write_text(page(given, said), encoding="utf-8")


def page(given: Sequence[Run | Results], said: Sequence[str] | None = None) -> str:
    """The page of one run, or the comparison of several. `said` replaces the headlines computed from the runs."""
    data = content(given)
    if said is not None:
        data["headlines"] = list(said)
    title = "thinwire: " + ", ".join(one.name for one in given)
    return Template(_asset("page.html")).substitute(
        title=html.escape(title),
        data=embed(data),
        css=_asset("page.css"),
        js=_asset("page.js"),
        chart_css=_asset("vendor/uPlot.min.css"),
        chart_js=_asset("vendor/uPlot.iife.min.js"),
        licence="Charts: uPlot 1.6.32\n\n" + _asset("vendor/uPlot.LICENSE"),
    )


def embed(data: Any) -> str:
    """JSON escaped for a script element: no end tag, comment or entity can appear in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
