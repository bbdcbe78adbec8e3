"""Names that users, scripts and other files rely on: they are what they were when the golden files were written.

What is added needs `python -m tests.golden.make --overwrite surface`, whose diff shows that nothing else has changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import thinwire

from . import frozen, internals

SURFACE = frozen.stored("surface")


def as_json(content: Any) -> Any:
    return json.loads(json.dumps(content))


def test_names() -> None:
    assert sorted(thinwire.__all__) == sorted(SURFACE["api"])


@pytest.mark.parametrize("name", SURFACE["api"])
def test_signatures(name: str) -> None:
    assert as_json(frozen.api())[name] == SURFACE["api"][name]


def test_texts_of_codecs() -> None:
    assert as_json(frozen.codecs()) == SURFACE["codecs"]


def test_environment() -> None:
    assert frozen.environment() == SURFACE["environment"]


def test_commands() -> None:
    assert list(frozen.commands()) == list(SURFACE["commands"])


@pytest.mark.parametrize("command", SURFACE["commands"])
def test_options(command: str) -> None:
    assert frozen.commands()[command] == SURFACE["commands"][command]


def test_columns(tmp_path: Path) -> None:
    assert as_json(frozen.columns(tmp_path)) == frozen.stored("columns")


def test_fields_of_journals() -> None:
    """By their tags, and the order of fields, which is all that a reader of lists has."""
    assert frozen.lines_of(internals.journal.Line) == frozen.stored("lines")


def test_exit_codes(tmp_path: Path) -> None:
    """0 done, 1 an error that is explained, 2 a word that is not understood."""
    from typer.testing import CliRunner

    codes = [
        CliRunner().invoke(internals.app, words).exit_code
        for words in (["--version"], ["plan", "--profile", str(tmp_path / "none.json")], ["plan", "--what"], ["what"])
    ]
    assert codes == [0, 1, 2, 2]


@pytest.mark.parametrize("path", frozen.stored("imports"))
def test_what_pages_named_can_be_imported(path: str) -> None:
    """Also where it has moved since: from its old place, with a `DeprecationWarning`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if path.startswith("-m "):
            name = path.removeprefix("-m ")
            found = importlib.util.find_spec(name)
            assert found is not None, f"there is no module {name}"
            if found.submodule_search_locations is not None:
                assert importlib.util.find_spec(f"{name}.__main__") is not None
            return
        try:
            _resolve(path)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("accelerate", "lightning", "transformers"):
                raise
            pytest.skip(f"{error.name} is not installed")


def _resolve(path: str) -> Any:
    """`MODULE:NAME`, `MODULE`, or a name inside of a module."""
    module, _, name = path.partition(":")
    if name:
        return getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")
    words = module.split(".")
    for cut in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:cut]))
        except ModuleNotFoundError as error:
            if not ".".join(words[:cut]).startswith(error.name or "?"):
                raise
            continue
        for word in words[cut:]:
            found = getattr(found, word)
        return found
    raise AssertionError(path)
