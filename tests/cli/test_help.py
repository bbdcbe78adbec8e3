"""Help of every command, colours, completion, and `thinwire doctor`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.support.limits import CEILING
from thinwire.cli.app import app


def _commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
    for name, child in (children or {}).items():
        yield from _commands(child, (*words, name))


COMMANDS = dict(_commands(get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_json(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"], terminal_width=120)
    assert done.exit_code == 0, done.output
    assert "Example" in done.output
    assert f"thinwire {' '.join(words)}" in done.output.split("Example", 1)[1]
    assert any("--json" in parameter.opts for parameter in COMMANDS[words].params)


def test_the_help_of_all() -> None:
    done = CliRunner().invoke(app, ["--help"], terminal_width=120)
    for name in ("doctor", "demo", "bench", "profile", "plan", "simulate", "lab", "selftest", "--debug", "Exit codes"):
        assert name in done.output


def _on_a_terminal(words: list[str], **environment: str) -> bytes:
    """What a command writes to a real terminal."""
    leader, follower = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "thinwire", *words],
        stdout=follower,
        stderr=follower,
        env={**variables, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # how Linux says that nobody writes any more
                break
            if not piece:
                break
            shown += piece
        process.wait(CEILING)
    os.close(leader)
    return shown


def test_colours() -> None:
    words = ["plan", "--profile", "none.json"]
    red = b"\x1b[31m"
    assert red in _on_a_terminal(words)
    assert red not in _on_a_terminal(words, NO_COLOR="1")
    piped = subprocess.run([sys.executable, "-m", "thinwire", *words], capture_output=True, timeout=CEILING)
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_bash_completes_names() -> None:
    """The script that bash is given, and what it gets when it asks, after `thinwire be`."""
    call = "import sys; sys.argv[0] = 'thinwire'; from thinwire.cli import main; main()"
    # Not the last command of the shell: it would give its place up, and the command would not find what shell it is in.
    script = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{call}" --show-completion; echo; true'],
        capture_output=True,
        text=True,
        timeout=CEILING,
    )
    assert "_THINWIRE_COMPLETE=complete_bash" in script.stdout, script.stderr
    asked = {"_THINWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "thinwire be", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", call], env={**os.environ, **asked}, capture_output=True, text=True, timeout=CEILING
    )
    assert done.stdout.split() == ["bench"], done.stderr


def test_doctor(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    done = CliRunner().invoke(app, ["doctor", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "thinwire works here" in done.output
    content = json.loads(file.read_text())
    assert content["command"] == "doctor"
    found = {row["check"]: row for row in content["rows"]}
    for name in ("torch", "gloo", "numba", "kernels", "kernel cache", "ip", "tc", "namespaces", "GPU", "Triton"):
        assert name in found
    assert {"matplotlib", "chromium"} <= set(found)
    for row in content["rows"]:
        assert row["good"] or row["fix"], row  # what is missing has a command
        assert row["good"] or not row["needed"], row


def test_doctor_with_a_broken_numba_and_without_tools(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('llvmlite is of another version')")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": paths}
    words = [sys.executable, "-m", "thinwire", "doctor"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=CEILING)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = " ".join(done.stdout.split())
    assert "BROKEN numba llvmlite is of another version pip install numba" in shown
    assert "missing ip not found apt-get install iproute2" in shown
    assert "thinwire cannot work here: numba, kernels" in shown
