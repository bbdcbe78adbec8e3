"""What `import thinwire` and the command line bring with them."""

from __future__ import annotations

import json
import subprocess
import sys

import thinwire

LOADED = """
import json, sys
{first}
before = set(sys.modules)
{then}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def _loaded(then: str, first: str = "") -> set[str]:
    """The modules that a fresh interpreter loads."""
    script = LOADED.format(first=first, then=then)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout.splitlines()[-1]))


def _of(loaded: set[str], *packages: str) -> set[str]:
    return {name for name in loaded if any(name == package or name.startswith(f"{package}.") for package in packages)}


def test_import_loads_nothing_of_others() -> None:
    assert not _of(_loaded("import thinwire"), "torch", "numpy", "numba", "msgspec", "typer", "rich")


def test_attach_loads_neither_compiler_nor_command_line() -> None:
    added = _loaded("import thinwire; thinwire.attach", first="import torch")
    assert "thinwire.ddp.attach" in added
    heavy = ("numba", "llvmlite", "typer", "rich", "click", "thinwire.cli", "thinwire.lab", "thinwire.kernels.cpu")
    assert not _of(added, *heavy)


def test_every_public_name_is_there() -> None:
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    assert set(thinwire.__all__) <= set(dir(thinwire))


def test_help_loads_neither_torch_nor_compiler() -> None:
    """The help of every command, found by walking the command tree."""
    walk = """
import contextlib, io
from typer.main import get_command
from typer.testing import CliRunner
from thinwire.cli.app import app

def names(command, path):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from names(child, [*path, name])

shown = []
for path in names(get_command(app), []):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output, (path, done.output)
    shown.append(path)
assert ["bench", "step"] in shown and len(shown) > 15, shown
"""
    heavy = ("torch", "numba", "llvmlite", "numpy", "matplotlib", "thinwire.codecs", "thinwire.engine.wire")
    assert not _of(_loaded(walk), *heavy)
