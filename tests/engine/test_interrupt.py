"""Ctrl-C in the middle of backward: the job ends at once, by itself, though its peer never answers."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("codec", ["topk(density=0.05)", "dense"])
def test_interrupt_in_the_middle_of_backward(codec: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.interrupted", str(rank), str(tmp_path / "store"), codec],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        text, _ = ranks[0].communicate(timeout=90)
        ended = time.time()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ranks[0].returncode == 128 + signal.SIGINT or ranks[0].returncode == -signal.SIGINT, text
    assert "KeyboardInterrupt" in text
    pressed = re.search(r"pressed ([0-9.]+)", text)
    assert pressed is not None
    assert ended - float(pressed[1]) < 3.0
