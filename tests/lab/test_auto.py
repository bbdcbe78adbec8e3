"""One whole job with `auto`, measured for real. What it decides on which measurements: `tests/auto/test_decisions.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from thinwire.auto.profiling import WATCHED
from thinwire.lab import Cluster


def test_a_job_is_measured_decided_for_and_trained() -> None:
    ends: list[dict[str, Any]] = []
    lines: list[str] = []

    def hear(rank: int, line: str) -> None:
        if line.startswith("{"):
            ends.append(json.loads(line))
        else:
            lines.append(line)

    root = Path(__file__).parents[2]
    words = ["", "gpt-small", "34"]
    program = f"import sys; sys.path[:0] = {[str(root), str(root / 'src')]!r}; sys.argv = {words!r}; "
    with Cluster(2, rate="300mbit") as cluster:
        command = [sys.executable, "-c", program + "from tests.lab.auto_job import main; main()"]
        result = cluster.run(command, on_line=hear)
    assert result.code == 0, lines
    first, second = sorted(ends, key=lambda end: int(end["rank"]))
    assert first["digest"] == second["digest"], "replicas are equal"
    for end in (first, second):
        assert end["finite"]
        assert end["lost"] <= 0.01, "nothing is lost on the way, but for what a cast rounds"
    steps = [step for step, _ in first["decisions"]]
    assert steps == [step for step, _ in second["decisions"]], "all ranks decide together"
    assert steps[0] == 0
    assert steps[1] >= WATCHED
    assert "watching DDP alone, without a hook" in first["words"]
    assert "with DDP alone" in first["decisions"][1][1]
    assert ("for everything: " in first["words"]) == first["measured"], "all that was measured is compared"
    assert first["words"].endswith("now: DDP alone, no hook") != first["hooked"]
    said = [line for line in lines if "auto, step" in line]
    assert len(said) == len(steps), "each decision is told once, by the first rank"
