"""The tables and the form of the pages: numbers come from results/, lines are short, code compiles."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import tables

ROOT = Path(__file__).parents[2]
PAGES = tables.pages(ROOT)
LINE = 120
DEFINITIONS = {"docs/message-format.md"}
"""Pages whose numbers define something; nothing measured them."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def outside_code(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page with their numbers, without what is in fences."""
    fence = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fence = not fence
        elif not fence:
            yield number, line


def tables_of(text: str) -> list[tuple[int, list[list[str]]]]:
    """Line and cells of every table on a page; the first row is the heading."""
    found: list[tuple[int, list[list[str]]]] = []
    last = -1
    for number, line in outside_code(text):
        if line.lstrip().startswith("|"):
            if number != last + 1:
                found.append((number, []))
            last = number
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if not set("".join(cells)) <= set("-: "):
                found[-1][1].append(cells)
    return found


def is_measured(cells: list[list[str]]) -> bool:
    """Whether a table has numbers: two cells of a row start with one, or a cell starts with a quantity."""
    for row in cells[1:]:
        plain = [re.sub(r"[*]", "", cell) for cell in row]
        if sum(bool(re.match(r"[+-]?\d", cell)) for cell in plain) > 1:
            return True
        if any(re.match(r"[+-]?\d+(\.\d+)? ?(ms|s|MB|KB|%|times|points|nats)\b", cell) for cell in plain):
            return True
    return False


@each_page
def test_the_tables_are_those_of_the_results(page: Path) -> None:
    assert tables.rewritten(page, ROOT) == page.read_text(), "stale: run make tables"


@each_page
def test_a_table_of_numbers_is_generated(page: Path) -> None:
    if str(page.relative_to(ROOT)) in DEFINITIONS:
        return
    text = page.read_text()
    generated = [
        range(text[: mark.start()].count("\n"), text[: mark.end()].count("\n") + 1)
        for mark in tables.MARK.finditer(text)
    ]
    for number, cells in tables_of(text):
        if is_measured(cells):
            assert any(number in lines for lines in generated), f"line {number}: a table of numbers without a marker"


def test_a_table_of_numbers_is_recognised() -> None:
    def measured(text: str) -> bool:
        return is_measured(tables_of(text)[0][1])

    assert measured("| link | time | bytes |\n|---|---|---|\n| 1 Gbit/s | 210 (209-211) | **0.37** |")
    assert measured("| link | time |\n|---|---|\n| fast | 210 ms |")
    assert not measured("| codec | when |\n|---|---|\n| `micro(density=0.01)` | slow links, 4 or more ranks |")


def test_every_mark_is_understood_and_every_table_is_shown_once() -> None:
    texts = [page.read_text() for page in PAGES]
    shown = [found[2] for text in texts for found in tables.MARK.finditer(text)]
    assert (
        len(shown) == sum(text.count("<!-- table") for text in texts) == sum(text.count("<!-- end") for text in texts)
    )
    specs = tomllib.loads((ROOT / "tools" / "tables.toml").read_text())
    assert sorted(shown) == sorted(specs), "each table of tools/tables.toml is on one page, once"


def test_no_page_repeats_a_table() -> None:
    seen: dict[str, str] = {}
    for page in PAGES:
        for number, cells in tables_of(page.read_text()):
            body, place = str(cells[1:]), f"{page.name}:{number}"
            assert seen.setdefault(body, place) == place, f"{place} repeats {seen[body]}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/*.json")), ids=lambda path: path.name)
def test_a_result_says_its_command(path: Path) -> None:
    result = json.loads(path.read_text())
    commands = result["command"] if isinstance(result["command"], list) else [result["command"]]
    assert all(re.match(r"thinwire |python |pytest ", command) for command in commands)
    specs = tomllib.loads((ROOT / "tools" / "tables.toml").read_text())
    assert any(spec.get("result", name) == path.stem for name, spec in specs.items()), "no table shows it"
    for row in result["rows"]:
        assert all((ROOT / "results" / run).is_file() for run in row.get("runs", []))


@each_page
def test_lines_are_short(page: Path) -> None:
    """Rows of tables and targets of links excepted; commands and code included."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        bare = re.sub(r"\]\([^)]*\)", "]", line)
        assert len(bare) <= LINE or line.lstrip().startswith("|"), f"line {number} has {len(bare)} characters"


@each_page
def test_python_compiles(page: Path) -> None:
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        compile(
            found[1], f"{page.name}:{text[: found.start()].count(chr(10)) + 1}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    """The check of the age of the tables can fail: in a result, and on a page."""
    for name in ("README.md", "docs", "results", "tools"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    check = [sys.executable, str(tmp_path / "tools" / "tables.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    result = tmp_path / "results" / "step-1gbit.json"
    result.write_text(result.read_text().replace('"seconds": 0.538', '"seconds": 0.539'))
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "stale, run make tables: docs/performance.md\n")
    assert subprocess.run(check[:-1], check=False).returncode == 0
    assert "| `fp32` | 539 (529-580) |" in (tmp_path / "docs" / "performance.md").read_text()


def test_means_and_differences_over_runs(tmp_path: Path) -> None:
    for seed, (dense, other) in enumerate([(0.5, 0.25), (0.75, 0.75)]):
        for method, value in (("dense", dense), ("other", other)):
            row = {"method": method, "seed": seed, "value": value, "density": None}
            (tmp_path / f"{method}-{seed}.json").write_text(json.dumps({"row": row}))
    names = ["other-0.json", "other-1.json"]
    fields = tables.summary(names, ["dense-0.json", "dense-1.json"], tmp_path)
    assert (fields["value"], fields["difference"], fields["differences"]) == (0.5, -0.125, [-0.25, 0.0])
    assert fields["error"] == pytest.approx(0.125)
    assert tables.cell(["{difference:pct+.1f} ± {error:pct.1f}"], fields) == "-12.5 ± 12.5"
    assert tables.cell(["{density:.2f}", "{values:.2f}"], fields) == "0.25, 0.75"
    assert "difference" not in tables.summary(["dense-0.json"], ["dense-0.json"], tmp_path)
