"""The long campaigns, as `make test-long` runs them: hostile input, kills, a soak. Small ones are in `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CAMPAIGNS = {
    "hostile input": ["-m", "tests.fuzz", "--messages", "200000", "--files", "20000"],
    "kills": ["-m", "tests.kills", "--kills", "20"],
    "soak": ["-m", "tests.soak", "--steps", "10000"],
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_campaign(name: str, tmp_path: Path) -> None:
    """Its output goes to a file, whose end a failure quotes."""
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, *CAMPAIGNS[name]], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        except BaseException as error:
            error.add_note(log.read_text()[-5000:])
            raise
        finally:
            process.terminate()
            process.wait()
    assert code == 0, log.read_text()[-5000:]
