"""Writes the tables of numbers in README.md and docs/ from results/*.json.

    python tools/tables.py            # rewrite every table in place (`make tables`)
    python tools/tables.py --check    # only say which pages are stale

A page has `<!-- table: NAME -->` where a table belongs, and `<!-- end -->` below it. `tools/tables.toml` says which columns
table NAME has; `results/NAME.json` has its rows and the command that made them, which is shown below the table. A row that
names `runs`, files of `bench converge`, has their numbers: means over the runs, one per seed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import string
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"^(<!-- table: ([\w-]+) -->)$.*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL)
UNITS = {"ms": 1e3, "us": 1e6, "MB": 1e-6, "KB": 1e-3, "pct": 1e2, "": 1}
LINE = 100
"""Commands longer than this are continued on the next line, where an option begins."""

Row = Mapping[str, Any]


class TableError(Exception):
    """A table that cannot be made: what is missing, and where."""


class _Cell(string.Formatter):
    """`str.format` with units: `{seconds:ms.1f}` is milliseconds. A list is written with commas; None empties the cell."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            return ", ".join(self.format_field(each, format_spec) for each in value)
        if value is None:
            raise _Empty
        if isinstance(value, str):
            return value
        found = re.fullmatch(r"(ms|us|MB|KB|pct|)(.*)", format_spec)
        assert found is not None
        unit, rest = found.groups()
        if not unit and not rest:
            return str(value)
        text = format(value * UNITS[unit], rest or ".0f")
        return re.sub(r"^([+-])0(\.0+)?$", r"0\2", text)  # no signed zero


class _Empty(Exception):
    pass


def cell(templates: Sequence[str], row: Row) -> str:
    """One cell: the first template whose fields the row has; empty if it has those of none."""
    for template in templates:
        try:
            return _Cell().vformat(template, (), row)
        except (_Empty, KeyError, IndexError):
            continue
    return ""


def load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TableError(f"{path.name}: {error}") from None
    assert isinstance(content, dict)
    return content


def rows_of(result: Mapping[str, Any], folder: Path) -> list[Row]:
    """The rows of a result; those that name runs get the numbers of these."""
    rows = []
    for row in result["rows"]:
        reference = row.get("reference", result.get("reference", []))
        rows.append({**summary(row["runs"], reference, folder), **row} if "runs" in row else row)
    return rows


def summary(names: Sequence[str], reference: Sequence[str], folder: Path) -> dict[str, Any]:
    """Means over runs of one method, and what they differ by from the reference's run of the same seed."""
    runs = [load(folder / name) for name in names]
    rows = [run["row"] for run in runs]
    fields: dict[str, Any] = {
        name: statistics.fmean(row[name] for row in rows)
        for name, value in rows[0].items()
        if isinstance(value, int | float) and all(row.get(name) is not None for row in rows)
    }
    values = [row["value"] for row in rows]
    fields |= {"method": rows[0]["method"], "values": values, "seeds": [row["seed"] for row in rows]}
    if len(values) > 1:
        fields["spread"] = statistics.stdev(values)
    dense = {row["seed"]: row["value"] for row in (load(folder / name)["row"] for name in reference)}
    if dense and list(names) != list(reference):
        differences = [row["value"] - dense[row["seed"]] for row in rows]
        fields |= {"differences": differences, "difference": statistics.fmean(differences)}
        if len(values) > 1:
            fields["error"] = statistics.stdev(differences) / math.sqrt(len(differences))
    if len(runs) == 1 and "curve" in runs[0]:
        curve = runs[0]["curve"]
        fields |= {"at": [point["value"] for point in curve], "shared": [point.get("value_shared") for point in curve]}
    return fields


def markdown(name: str, spec: Mapping[str, Any], result: Mapping[str, Any], folder: Path) -> str:
    """The table and, below it, the command that made it."""
    columns = spec["columns"]
    commands = result.get("command")
    if not commands:
        raise TableError(f"results/{name}.json: no field 'command'")
    lines = ["| " + " | ".join(heading for heading, *_ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows_of(result, folder):
        lines.append("| " + " | ".join(cell(templates, row) for _, *templates in columns) + " |")
    if "source" in spec:
        return "\n".join([*lines, "", f"Commands and intervals: {spec['source']}."])
    listed = [commands] if isinstance(commands, str) else commands
    return "\n".join([*lines, "", "```sh", *(_wrapped(command) for command in listed), "```"])


def _wrapped(command: str) -> str:
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if lines[-1] and len(lines[-1]) + len(part) > LINE:
            lines.append(f"    {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}".strip() if len(lines) == 1 else f"{lines[-1]} {part}"
    return " \\\n".join(_folded(line) for line in lines)


def _folded(line: str) -> str:
    """A list in quotes that is too long, one line after the other: the shell drops a backslash at the end of a line."""
    parts, rest = [], line
    while len(rest) > LINE and (cuts := [at.end() for at in re.finditer(r",(?=\w)", rest[: LINE - 1])]):
        parts.append(rest[: cuts[-1]])
        rest = rest[cuts[-1] :]
    return "\\\n".join([*parts, rest])


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted(root.glob("docs/**/*.md"))]


def rewritten(page: Path, root: Path = ROOT) -> str:
    """The text of a page with its tables made anew."""
    specs = tomllib.loads((root / "tools" / "tables.toml").read_text())

    def made(found: re.Match[str]) -> str:
        name = found[2]
        if name not in specs:
            raise TableError(f"{page.name}: tools/tables.toml has no table {name!r}")
        spec = specs[name]
        result = load(root / "results" / f"{spec.get('result', name)}.json")
        result["rows"] = [result["rows"][i] for i in spec.get("rows", range(len(result["rows"])))]
        return f"{found[1]}\n{markdown(name, spec, result, root / 'results')}\n{found[3]}"

    return MARK.sub(made, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of README.md and docs/ from results/*.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is stale")
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = rewritten(page)
        if text != page.read_text():
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(text)
    if stale:
        print("stale, run make tables:" if check else "rewritten:", ", ".join(stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
