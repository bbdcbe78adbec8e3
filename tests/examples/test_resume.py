"""`examples/resume.py`, killed twice, then with other ranks; `python -m tests.kills --kills 20` is the long form."""

from __future__ import annotations

import argparse
import random
import runpy
from pathlib import Path

from tests import kills
from tests.ranks import run

CODEC, STEPS = "laplace(density=0.05)", 30


def _here(folder: str, steps: int) -> str:
    """Let the example train in ranks that are there already."""
    given = argparse.Namespace(folder=Path(folder), codec=CODEC, steps=steps, every=kills.EVERY)
    return str(runpy.run_path(str(kills.ROOT / "examples" / "resume.py"))["train"](given))


def test_a_killed_job_ends_with_the_same_bits(tmp_path: Path) -> None:
    alone = run(2, _here, str(tmp_path / "alone"), STEPS)
    killed = kills.job(tmp_path / "killed", CODEC, 2, 2, random.Random(3), steps=STEPS)
    assert len(killed.killed) == 2
    assert alone == [killed.model] * 2
    resized = run(3, _here, str(tmp_path / "killed"), STEPS + 5)
    assert len(set(resized)) == 1
    assert resized[0] != killed.model
