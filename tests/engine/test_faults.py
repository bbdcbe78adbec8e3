"""A short run of `python -m tests.faults`."""

from __future__ import annotations

import pytest

from tests import faults


@pytest.mark.parametrize("codec", faults.CODECS[:2])
def test_faults_under_a_scaler(codec: str) -> None:
    found = faults.compare(codec, 120, seeds=2 if codec.startswith("topk") else 3)
    assert found["faults"] > 3
    if codec.startswith("topk"):
        assert found["same_bits"], "what does not count steps is not even disturbed"
    else:
        assert found["apart"] < 4.0
