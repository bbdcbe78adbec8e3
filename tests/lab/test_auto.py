"""`auto` on links that change while a job runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from thinwire.frontends.auto import SETTLE, WINDOW
from thinwire.frontends.profile import WATCHED
from thinwire.lab import Cluster

from .conftest import needs_namespaces


def _run(steps: int, rates: dict[int, str], least: float) -> list[list[Any]]:
    """The decisions of `auto` in a job of so many steps; `rates` are those of the links from a step on, 0 for the first."""
    said: list[dict[str, Any]] = []
    with Cluster(2, rate=rates[0]) as cluster:

        def hear(rank: int, line: str) -> None:
            if not line.startswith("{"):
                return
            item = json.loads(line)
            said.append(item)
            if "step" in item:
                cluster.set_rate(rates[item["step"]])

        root = Path(__file__).parents[2]
        words = ["", "gpt-small", str(steps), json.dumps([step for step in rates if step]), str(least)]
        program = f"import sys; sys.path[:0] = {[str(root), str(root / 'src')]!r}; sys.argv = {words!r}; "
        job = cluster.start(
            [sys.executable, "-c", program + "from tests.lab.changing import main; main()"], on_line=hear
        )
        result = job.wait()
    assert result.code == 0
    ends = sorted((item for item in said if "rank" in item), key=lambda item: item["rank"])
    assert len(ends) == 2
    assert ends[0]["digest"] == ends[1]["digest"], "replicas are equal"
    assert all(end["finite"] for end in ends)
    decisions: list[list[Any]] = ends[0]["decisions"]
    assert [step for step, _ in decisions] == [step for step, _ in ends[1]["decisions"]], "all ranks decide together"
    return decisions


@needs_namespaces
def test_links_that_become_slow_and_fast_again_are_noticed() -> None:
    """Fast: DDP alone. Slow: a plan that compresses, within 100 steps. Fast again: looked at again."""
    drop, rise = 60, 170  # the first decisions may take 49 steps; half of a step no plan saves on the fast link
    decisions = _run(270, {0: "1gbit", drop: "100mbit", rise: "1gbit"}, least=0.5)
    slow = [text for step, text in decisions if drop < step <= drop + 100]
    assert any("planning again" in text or "measured again" in text for text in slow), decisions
    assert any("switching to plan" in text for text in slow), decisions
    fast = [text for step, text in decisions if rise < step <= rise + 100]
    assert any("planning again" in text for text in fast), decisions


@needs_namespaces
def test_a_link_that_changes_during_a_trial_is_planned_for() -> None:
    """The trial takes far longer than was predicted: links are looked at before the plan is blamed for it."""
    drop = WATCHED + 4
    decisions = _run(drop + 60, {0: "1gbit", drop: "5mbit"}, least=0.0)
    assert decisions[1][0] == WATCHED
    assert "switching to plan" in decisions[1][1], decisions
    assert "planning again" in decisions[2][1], decisions
    assert decisions[2][0] == WATCHED + SETTLE + WINDOW
    assert len(decisions) > 3, decisions
