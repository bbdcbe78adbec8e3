"""`auto` on links that change while a job runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from thinwire.lab import Cluster

from .changing import DROP, RAISE
from .conftest import needs_namespaces


@needs_namespaces
def test_links_that_become_slow_and_fast_again_are_noticed() -> None:
    """Fast: DDP alone or dense. Slow: a plan that compresses, within 100 steps. Fast again: looked at again."""
    said: list[dict[str, Any]] = []
    with Cluster(2, rate="none") as cluster:

        def hear(rank: int, line: str) -> None:
            if not line.startswith("{"):
                return
            item = json.loads(line)
            said.append(item)
            if "step" in item:
                cluster.set_rate("100mbit" if item["step"] == DROP else "none")

        root = Path(__file__).parents[2]
        program = f"import sys; sys.path[:0] = {[str(root), str(root / 'src')]!r}; sys.argv = ['', 'gpt-small']; "
        job = cluster.start(
            [sys.executable, "-c", program + "from tests.lab.changing import main; main()"], on_line=hear
        )
        result = job.wait()
    assert result.code == 0
    ends = sorted((item for item in said if "rank" in item), key=lambda item: item["rank"])
    assert len(ends) == 2
    assert ends[0]["digest"] == ends[1]["digest"], "replicas are equal"
    assert all(end["finite"] for end in ends)
    decisions = ends[0]["decisions"]
    assert [step for step, _ in decisions] == [step for step, _ in ends[1]["decisions"]], "all ranks decide together"
    slow = [text for step, text in decisions if DROP < step <= DROP + 100]
    assert any("planning again" in text or "measured again" in text for text in slow), decisions
    assert any("switching to plan" in text for text in slow), decisions
    fast = [text for step, text in decisions if step > RAISE]
    assert any("planning again" in text for text in fast), decisions
