"""`thinwire bench predict`: a small real run, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.planner import examples
from thinwire.cli.app import app
from thinwire.lab.bench_predict import choose_plans, rank_correlation

from .conftest import needs_namespaces


@needs_namespaces
def test_a_run_has_a_row_for_every_plan(tmp_path: Path) -> None:
    file = tmp_path / "predict.json"
    words = "bench predict --workload gpt-small --rates 1gbit --plans 2 --rounds 1 --steps-per-round 1 --warm-up 4 --budget 1"
    result = CliRunner().invoke(app, [*words.split(), "--json", str(file)])
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert [row["plan"] for row in content["rows"]] == [0, 1]
    for row in content["rows"]:
        assert row["predicted_seconds"] > 0
        assert row["measured_seconds"] > 0
        assert row["rate"] == "1gbit"
    assert {"mean_absolute_error", "rank_correlation", "span"} <= set(content["summary"])


def test_plans_lie_between_the_fastest_and_the_slowest() -> None:
    profile = examples.profile([200_000] * 10, bits_per_second=1e8)
    plans = choose_plans(profile, 6, seed=1)
    assert len({plan.groups for plan in plans}) == 6
    for plan in plans:
        plan.validate()


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 3], [5, 6, 70]) == pytest.approx(1.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0.0
