"""A short run of the long one; see `soak.py`."""

from __future__ import annotations

from tests.ranks import run
from tests.soak import CODECS, soak


def test_a_hundred_steps() -> None:
    results = run(2, soak, 100, 3)
    for result in results:
        assert result["checks"] >= 20
    assert sum(result["faults"] for result in results) >= 5
    assert results[0]["void"] == results[1]["void"] > 0
    assert len(CODECS) > results[0]["codecs"] >= 3
