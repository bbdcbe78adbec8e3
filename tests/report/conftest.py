from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import sample


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a job of two ranks wrote."""
    return sample.make(tmp_path_factory.mktemp("runs") / "planned")


@pytest.fixture(scope="session")
def hostile_run(real_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample.spoil(real_run, tmp_path_factory.mktemp("runs") / "hostile")
