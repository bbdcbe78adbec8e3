"""Results of runs, and those of versions that counted what a rank hands over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from thinwire.lab import run_file

POINT = {"step": 1, "bytes": 100.0, "traffic": 300.0}


def _earlier(method: str) -> dict[str, Any]:
    """A run as it was written before: 4 ranks, 100 bytes handed over, 300 on the link if all were gathered."""
    row = {"method": method, "workers": 4, "parameters": 1000, "bytes_per_rank": 100.0, "traffic_per_rank": 300.0}
    row |= {"compression_rate": 40.0, "rate_dense": 40.0}
    return {"spec": {"method": method}, "row": row, "curve": [POINT], "trace": [POINT]}


def test_columns_compare_with_a_dense_step_on_the_same_link() -> None:
    found = run_file.columns(300.0, 1000, 4)
    assert found["bytes_per_rank"] == found["traffic_per_rank"] == 300.0
    assert found["compression_rate"] == pytest.approx(1.5 * 4000 / 300)
    assert run_file.columns(0.0, 1000, 1)["compression_rate"] is None
    assert set(run_file.columns(None, 1000, 4).values()) == {None}


def test_an_earlier_run_is_counted_alike(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(_earlier("topk(density=0.01)")))
    content = run_file.read(path)
    assert content is not None
    assert content["row"].items() >= run_file.columns(300.0, 1000, 4).items()
    assert content["row"]["rate_dense"] is None
    assert content["trace"] == content["curve"] == [{"step": 1, "link_bytes": 300.0}]
    path.write_text(json.dumps(content))
    assert run_file.read(path) == content, "what is counted so already stays"


def test_what_an_earlier_run_does_not_know_is_not_guessed() -> None:
    content = run_file.counted_alike(_earlier("updates(topk(density=0.01), 0.3)"))
    assert content["row"].items() >= run_file.columns(None, 1000, 4).items()
    assert content["curve"] == [{"step": 1, "link_bytes": None}]


def test_interfaces_counted_the_same_before() -> None:
    row = {"method": "fp32", "workers": 2, "bytes_per_rank": 4100.0, "compression_rate": 0.98}
    content = run_file.counted_alike({"spec": {"seed": 0}, "row": row})
    assert content["row"] == {**row, "counted_by": "interface"}
