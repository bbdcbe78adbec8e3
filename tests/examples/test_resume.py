"""`examples/resume.py`: killed twice, and then with another number of ranks. `python -m tests.kills --kills 20` is the long form."""

from __future__ import annotations

import random
from pathlib import Path

from tests import kills


def test_killed_jobs_end_with_the_same_bits(tmp_path: Path) -> None:
    dice = random.Random(3)
    alone = kills.job(tmp_path / "alone", "laplace(density=0.05)", 2, 0, dice, steps=30)
    killed = kills.job(tmp_path / "killed", "laplace(density=0.05)", 2, 2, dice, steps=30)
    assert (len(killed.killed), alone.resumed) == (2, [])
    assert killed.model == alone.model
    more = kills.job(tmp_path / "killed", "laplace(density=0.05)", 3, 0, dice, steps=35)
    assert more.resumed == [30]
    assert "the state is of 2 ranks, this job has 3" in (tmp_path / "killed.log").read_text()
