"""`thinwire bench step`: a small real run, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.feedback import Detached
from thinwire.lab import LabError
from thinwire.lab.bench_step import METHODS, Options, Visit, check, interval, ratio_interval, split
from thinwire.lab.method_spec import UpdatesSpec, parse_updates
from thinwire.lab.step_worker import make
from thinwire.lab.workloads import load

from .conftest import needs_namespaces

FIELDS = {
    *("workload", "nodes", "ranks_per_node", "rate", "method", "seconds", "ci_low", "ci_high", "ratio_to_ceiling"),
    *("ratio_to_fp32", "recovered", "bytes_per_rank", "stats_bytes_per_rank", "cpu_seconds", "samples", "pinned"),
    *("measured_rate", "calibrated"),
}


@needs_namespaces
def test_a_run_has_a_row_for_every_method_and_its_bytes_are_those_of_the_interfaces(tmp_path: Path) -> None:
    methods = ["none", "noop", "fp32", "micro(density=0.01)", "laplace(density=0.01)@1"]
    methods += ["updates(randomblock(ratio=64), 0.3, period=2)"]
    file = tmp_path / "step.json"
    words = "bench step --workload gpt-small --rates none --rounds 2 --steps-per-round 2 --warm-up 4"
    drawn = tmp_path / "step.svg"
    options = ["--methods", ",".join(methods), "--json", str(file), "--plot", str(drawn)]
    result = CliRunner().invoke(app, [*words.split(), *options])
    assert result.exit_code == 0, result.output
    for text in (*methods, "seconds per step"):
        assert f"<!-- {text} -->" in drawn.read_text()
    content = json.loads(file.read_text())
    assert content["command"] == "bench step"
    assert content["summary"]["peak_memory_bytes"][0] > 1e8
    rows = {row["method"]: row for row in content["rows"]}
    assert list(rows) == methods
    for row in rows.values():
        assert set(row) >= FIELDS
        assert row["samples"] == 4
        assert row["ci_low"] <= row["seconds"] <= row["ci_high"]
        assert row["cpu_seconds"] > 0
        assert row["ratio_to_fp32_low"] <= row["ratio_to_fp32_high"]
        assert not any(isinstance(value, dict | list) for value in row.values())
    assert rows["none"]["ratio_to_ceiling"] == rows["fp32"]["ratio_to_fp32"] == 1.0
    assert rows["noop"]["bytes_per_rank"] < 0.001 * rows["fp32"]["bytes_per_rank"]
    parameters = 4 * 1_924_224
    assert rows["fp32"]["payload_bytes_per_rank"] == pytest.approx(parameters, rel=0.05)
    for method in methods[3:]:
        row = rows[method]
        assert row["payload_bytes_per_rank"] == pytest.approx(row["expected_bytes_per_rank"], rel=0.05)
        assert row["bytes_per_rank"] < 0.1 * rows["fp32"]["bytes_per_rank"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_method_steps_with_the_momentum_that_was_asked_for(momentum: float) -> None:
    work = load("gpt-small")
    contestant = make("none", work, None, momentum=momentum)
    contestant.step(work, 0)
    assert contestant.optimizer.defaults["momentum"] == momentum
    assert any(state.get("momentum_buffer") is not None for state in contestant.optimizer.state.values()) == (
        momentum > 0
    )


def test_commas_inside_brackets_belong_to_the_codec() -> None:
    assert split("none, fp32@4,micro(density=0.01, values='fp16')@4") == [
        "none",
        "fp32@4",
        "micro(density=0.01, values='fp16')@4",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(methods=("fp23",)), "fp23"),
        (Options(methods=("fp32@big",)), "buckets in MB"),
        (Options(methods=("fp32", "fp32")), "twice"),
        (Options(rates=("fast",)), "'fast' is not understood"),
        (Options(methods=("updates(fp32)",)), "there is no codec 'fp32'"),
        (Options(methods=("updates(randomblock, 2)",)), "from 0 to 1"),
        (Options(methods=("updates(randomblock, periods=8)",)), "no option 'periods'"),
        (Options(methods=("updates(randomblock, 0.3, period=0.5)",)), "whole number of steps"),
    ],
)
def test_what_cannot_run_is_refused_before_there_is_a_cluster(options: Options, message: str) -> None:
    with pytest.raises(LabError, match=message):
        check(options)


def test_the_text_of_local_updates() -> None:
    assert parse_updates("randomblock") is None
    given = parse_updates("updates(randomblock(ratio=64), 'auto', period=8)")
    assert given == UpdatesSpec("randomblock(ratio=64)", Detached("auto"), 8)
    assert parse_updates("updates(topk)") == UpdatesSpec("topk", Detached(0.3), 1)


def test_all_methods_by_default_are_known() -> None:
    check(Options(methods=METHODS))


def test_the_interval_holds_the_median_and_shrinks_with_agreement() -> None:
    low, high = interval([[1.0, 1.1], [1.2, 0.9], [1.0, 1.05]])
    assert 0.9 <= low <= 1.025 <= high <= 1.2
    assert interval([[2.0, 2.0]] * 5) == (2.0, 2.0)


def test_the_interval_of_a_ratio_takes_both_from_the_same_rounds() -> None:
    def visits(*seconds: float) -> list[Visit]:
        return [Visit(round_, [value], 0, 0, 0, 0, 0, 0) for round_, value in enumerate(seconds)]

    base = visits(1.0, 2.0, 4.0, 8.0, 16.0)
    slower = visits(1.1, 2.2, 4.4, 8.8, 17.6)
    low, high = ratio_interval(slower, base) or (0.0, 0.0)
    assert low == pytest.approx(1.1) == high  # a machine that becomes slower is slower for both
    assert ratio_interval(slower, []) is None
    low, high = ratio_interval(visits(2.0, 2.0, 4.0, 8.0, 16.0), base) or (0.0, 0.0)
    assert low == 1.0 < high
