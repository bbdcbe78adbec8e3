"""What kind a test is (its mark), and which tests share a worker of pytest-xdist.

A kind follows from where a test stands: tests/lab is `lab`, tests/examples is `examples`, a module that imports
tests.ranks (through a helper, too) is `ranks`, everything else is `unit`. A test that needs network namespaces is
`lab` wherever it stands. Only `slow` is written by hand: what is too long for `make test`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

MARKS = {
    "unit": "in this process, or in processes of its own that share nothing",
    "ranks": "of a module with real ranks over gloo",
    "lab": "emulated clusters: pins cores, shapes links, counts interfaces; alone on the machine",
    "examples": "runs an example; alone on the machine",
    "quick": "of `make test-quick`: by rule, every unit test but those of the modules that take long",
    "slow": "only in `make test-long`: long storms, campaigns and soaks",
    "namespaces(mode)": "needs network namespaces, in this mode or in any; skipped where there are none",
}

HERE = Path(__file__).parents[1]
IMPORTS = re.compile(r"^from (tests[\w.]*) import (.+)$", re.MULTILINE)
SIZE = re.compile(r"\b(?:run|outcomes)\((\w+),")

# Beginning with the longest: a worker that takes a long module last keeps the other one waiting. Measured; what is not
# named here follows in the order of the collection.
LONGEST = (
    "test_suite",
    "engine.test_vanish",
    "engine.test_interrupt",
    "test_run",
    "cli.test_mistakes",
    "report",
    "docs.test_pages",
    "hostile.test_hostile_messages",
    "kernels.test_sliced",
    "cli.test_help",
    "kernels.test_laplace",
    "codecs.test_laws",
    "codecs.test_baselines",
)
# Unit tests that `make test-quick` leaves out, as they take more than a few seconds: they start processes, or try much.
NOT_QUICK = frozenset(
    {
        "integrations/test_integrations.py",
        "cli/test_help.py",
        "cli/test_mistakes.py",
        "cli/test_planning.py",
        "docs/test_pages.py",
        "engine/test_interrupt.py",
        "engine/test_vanish.py",
        "hostile/test_hostile_messages.py",
        "kernels/test_sliced.py",
        "report/test_browser.py",
        "report/test_page.py",
        "report/test_trace.py",
        "test_run.py",
        "test_suite.py",
    }
)


def mark(items: list[pytest.Item]) -> None:
    """Mark every test with its kind and its group, and put those groups first that take long."""
    groups: dict[pytest.Item, str] = {}
    for item in items:
        kind = _kind(item)
        item.add_marker(kind)
        if kind == "unit" and item.path.relative_to(HERE).as_posix() not in NOT_QUICK:
            item.add_marker("quick")
        groups[item] = _group(item, kind)
        item.add_marker(pytest.mark.xdist_group(groups[item]))
    sizes = Counter(groups.values())
    items.sort(key=lambda item: _place(item, groups[item], sizes[groups[item]]))


def _kind(item: pytest.Item) -> str:
    folder = item.path.relative_to(HERE).parts[0]
    if folder in ("lab", "examples"):
        return folder
    if item.get_closest_marker("namespaces"):
        return "lab"
    return "ranks" if _uses_ranks(item.path) else "unit"


@functools.cache
def _uses_ranks(file: Path) -> bool:
    """Whether a module imports tests.ranks, itself or through another module of the tests."""
    for module, names in IMPORTS.findall(_source(file)):
        for dotted in (module, *(f"{module}.{name.strip()}" for name in names.split(","))):
            other = HERE.parent / (dotted.replace(".", "/") + ".py")
            if dotted == "tests.ranks" or (other.exists() and _uses_ranks(other)):
                return True
    return False


def _group(item: pytest.Item, kind: str) -> str:
    """Tests whose ranks are a pool of one size, or else those of a module or of a shared fixture; a slow test alone."""
    if item.get_closest_marker("slow"):
        return item.nodeid.replace("@", " ")
    if kind == "ranks" and (size := _size(item)):
        return f"ranks{size}"
    if _shares_a_fixture(item):
        return item.path.parent.name
    return item.path.relative_to(HERE).with_suffix("").as_posix().replace("/", ".")


def _size(item: pytest.Item) -> int:
    """The number of ranks that a test says, or else what its module says most often."""
    assert isinstance(item, pytest.Function)
    for text in (_body(item), _source(item.path)):
        sizes: Counter[int] = Counter()
        for word in SIZE.findall(text):
            value = int(word) if word.isdigit() else _named(item, word)
            if value:
                sizes[value] += 1
        if sizes:
            return sizes.most_common(1)[0][0]
    return 0


def _named(item: pytest.Function, word: str) -> int:
    value = item.callspec.params.get(word) if hasattr(item, "callspec") else None
    value = value if value is not None else getattr(item.module, word, None)
    return value if isinstance(value, int) else 0


def _body(item: pytest.Function) -> str:
    test = getattr(getattr(item.obj, "hypothesis", None), "inner_test", item.obj)
    return inspect.getsource(test)


def _shares_a_fixture(item: pytest.Item) -> bool:
    known = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    return any(each[-1].scope == "session" and each[-1].baseid.startswith("tests/") for each in known.values())


def _place(item: pytest.Item, group: str, tests: int) -> tuple[int, int]:
    if item.get_closest_marker("slow"):
        return 0, 0
    if group.startswith("ranks"):
        return 1, -tests
    return (2, LONGEST.index(group)) if group in LONGEST else (3, 0)


@functools.cache
def _source(path: Path) -> str:
    return path.read_text()
