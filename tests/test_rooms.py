"""The rooms of `src/thinwire` import only downwards, in functions too; no import hides a cycle, and no wire is a giant."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import thinwire
from thinwire.auto.tuner import AutoTuner
from thinwire.ddp.hook import BucketHook
from thinwire.ddp.wire import DDPWire
from thinwire.engine.exchange import Exchange
from thinwire.engine.executor import Executor
from thinwire.engine.session import Session
from thinwire.updates.optimizer import LocalUpdates

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


def _name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(file): file for file in FILES}


def _type_checking(tree: ast.AST) -> set[ast.AST]:
    """What only type checkers read."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def _modules_imported(name: str, file: Path) -> set[str]:
    """The modules that a module imports at run time, wherever in it."""
    tree = ast.parse(file.read_text())
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in set(ast.walk(tree)) - _type_checking(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {full if (full := f"{module}.{alias.name}") in MODULES else module for alias in node.names}
    return found & MODULES.keys() - {name}


def test_no_import_hides_a_cycle() -> None:
    graph = {name: _modules_imported(name, file) for name, file in MODULES.items()}
    assert sum(len(imported) for imported in graph.values()) > len(MODULES)
    graphlib.TopologicalSorter(graph).prepare()  # raises, and names the cycle


MOST_METHODS = 30


@pytest.mark.parametrize(
    "kind", [DDPWire, AutoTuner, Exchange, LocalUpdates, Session, Executor, BucketHook], ids=lambda kind: kind.__name__
)
def test_a_wire_stays_small(kind: type) -> None:
    ours = [base for base in kind.__mro__ if base.__module__.startswith("thinwire.")]
    methods = {
        name
        for base in ours
        for name, value in vars(base).items()
        if callable(value) or isinstance(value, property | classmethod | staticmethod)
    }
    assert 0 < len(methods) <= MOST_METHODS, sorted(methods)
