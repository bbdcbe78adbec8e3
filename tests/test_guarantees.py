"""Every test and program that `docs/guarantees.md` names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_what_the_page_names_exists() -> None:
    named = 0
    for row in PAGE.splitlines():
        file: Path | None = None
        for path, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", row):
            if path:
                file = ROOT / path
                assert file.is_file(), f"{path} is not there"
            if name:
                assert file is not None, f"{name}: of which file?"
                assert f"def {name}(" in file.read_text(), f"{file.name} has no {name}"
            named += bool(path or name)
    assert named > 30


def test_the_programs_it_names_exist() -> None:
    for path in re.findall(r"python (tests/\w+\.py)", PAGE):
        assert (ROOT / path).is_file()
    for module in re.findall(r"python -m (tests\.\w+)", PAGE):
        path = f"{module.replace('.', '/')}.py"
        assert (ROOT / path).is_file(), module
