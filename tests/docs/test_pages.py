"""The documentation: marked blocks run, the API page names what is public, every page is in the navigation.

A fence below `<!-- run -->` is run by python, one below `<!-- run: 2 ranks -->` by torchrun; both in an empty folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from tests.support.limits import CEILING

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")])
BLOCK = re.compile(
    r"^<!-- run(?:: (\d+) ranks)?(?:, needs (\w+))? -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def _blocks() -> list[tuple[str, str, int, str | None, str]]:
    return [
        (page.name, f"{page.name}:{text[: found.start()].count(chr(10)) + 1}", int(found[1] or 0), found[2], found[3])
        for page in PAGES
        for text in [page.read_text()]
        for found in BLOCK.finditer(text)
    ]


def test_every_mark_is_understood() -> None:
    """A mark with a slip of the pen would otherwise be a block that nobody runs."""
    marks = sum(len(re.findall(r"<!--\s*run", page.read_text())) for page in PAGES)
    assert marks == len(_blocks()) > 3
    assert {"index.md", "api.md"} <= {page for page, *_ in _blocks()}


@pytest.mark.parametrize(
    ("ranks", "needs", "source"), [block[2:] for block in _blocks()], ids=[b[1] for b in _blocks()]
)
def test_the_block_runs(ranks: int, needs: str | None, source: str, tmp_path: Path) -> None:
    if needs is not None:
        pytest.importorskip(needs, reason=f"{needs} is not installed; make test-frameworks has it")
    script = tmp_path / "block.py"
    script.write_text(source)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks else []), str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CEILING,
        # Plans of earlier runs, and those of this one, belong into the folder too.
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_api_page_is_the_api() -> None:
    """mkdocstrings takes the rest from the docstrings; it would skip members that are not there."""
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: thinwire\.(\w+)$", page, re.MULTILINE)) == sorted(thinwire.__all__)
    listed = re.findall(
        r"^::: thinwire\.(\w+)\n    options:\n(?:      \w+: \w+\n)*      members: \[(.*?)\]$", page, re.M | re.S
    )
    assert {name for name, _ in listed} >= {"Wire", "Exchange", "LocalUpdates", "Plan", "Codec"}
    for name, members in listed:
        missing = [member for member in re.split(r",\s+", members) if not hasattr(getattr(thinwire, name), member)]
        assert not missing, f"thinwire.{name} has no {missing}"


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    """Files of the repository, and pages, that a page speaks of."""
    text = page.read_text()
    for name in re.findall(r"`((?:docs|examples|tests|src|results)/[\w./-]+\.\w+)", text):
        assert (ROOT / name).is_file(), name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
