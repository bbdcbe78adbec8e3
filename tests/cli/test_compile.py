"""`thinwire compile`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.limits import CEILING


def _compile(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "THINWIRE_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "thinwire", "compile", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CEILING)


def test_compiles_once_and_says_where(tmp_path: Path) -> None:
    file = tmp_path / "compiled.json"
    words = ["--codec", "int8", "--codec", "dense", "--json", str(file)]
    done = _compile(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    rows = {row["codec"]: row["kernels"] for row in content["rows"]}
    assert set(rows) == {"int8", "dense"}
    assert rows["int8"] > 0
    assert Path(content["summary"]["folder"]).is_relative_to(tmp_path)
    assert any(Path(content["summary"]["folder"]).glob("*.nbc"))
    again = _compile(tmp_path, *words)
    assert again.stdout.startswith("nothing to do"), again.stdout + again.stderr
    assert json.loads(file.read_text())["rows"] == []


def test_a_codec_that_does_not_exist_is_a_sentence(tmp_path: Path) -> None:
    done = _compile(tmp_path, "--codec", "micr")
    assert done.returncode == 1
    assert "micro" in done.stderr
    assert "Traceback" not in done.stderr
