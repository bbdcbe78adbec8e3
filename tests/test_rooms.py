"""The rooms of `src/thinwire` import only downwards, in functions and for type checkers too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import thinwire

SOURCE = Path(thinwire.__file__).parent

ORDER = (
    ("__init__", "__main__", "run", "cli"),
    ("autoattach", "integrations"),
    ("lab", "report"),
    ("ddp",),
    ("auto",),
    ("updates", "experimental"),
    ("engine",),
    ("profiler",),
    ("planner",),
    ("chains",),
    ("feedback",),
    ("codecs",),
    ("comm",),
    ("messages",),
    ("kernels",),
    ("errors", "log", "moved", "ranges", "suggest", "traffic", "version"),
)
"""From the top to the bottom; rooms on one line do not import each other."""

ALLOWED = {("__init__", "cli"), ("__main__", "cli"), ("cli", "run")}
"""Entry points beside each other."""

LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """The rooms that a file imports, wherever in it, and the line."""
    package = ["thinwire", *file.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            modules = [[*base, alias.name] for alias in node.names] if base == ["thinwire"] else [base]
        else:
            continue
        for module in modules:
            if module[0] == "thinwire" and len(module) > 1:
                yield module[1], node.lineno


def _room(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_room_has_a_place_in_the_order() -> None:
    assert {_room(file) for file in FILES} == set(LEVEL)


def test_rooms_import_only_downwards() -> None:
    upward = [
        f"{file.relative_to(SOURCE)}:{line} imports {room}"
        for file in FILES
        for room, line in _imports(file)
        if room in LEVEL
        and room != _room(file)
        and LEVEL[room] <= LEVEL[_room(file)]
        and (_room(file), room) not in ALLOWED
    ]
    assert not upward, "\n".join(upward)
