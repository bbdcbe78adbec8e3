"""For the API reference: turns what docstrings align in columns into lists, and names of pages into links."""

from __future__ import annotations

import re
from typing import Any

import griffe

OPTION = re.compile(r'^("?\w+"?(?:, \w+)*) {2,}(\S.*)$')
PAGE = re.compile(r"`docs/([\w-]+)\.md`")


class Columns(griffe.Extension):
    """An aligned `name   meaning` becomes an item of a list; further indented lines belong to it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(PAGE.sub(r"[\1](\1.md)", obj.docstring.value))


def listed(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        found = OPTION.match(line)
        if found:
            lines += [] if inside else [""]
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif inside and line.startswith("  "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
        inside = bool(found) or (inside and line.startswith("  "))
    return "\n".join(lines)
