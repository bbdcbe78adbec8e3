"""Accelerate, Lightning and the Trainer of transformers: the real packages, two processes over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.jobs import CODEC, HALF, STEPS
from tests.support.limits import CEILING

ROOT = Path(__file__).parents[2]
STATES = {  # package, and where the state of a wire lies
    "accelerate": ("accelerate", "checkpoint/thinwire"),
    "lightning": ("lightning", f"step={HALF}.ckpt.thinwire"),
    "trainer": ("transformers", f"checkpoint-{HALF}/thinwire"),
}


def _job(framework: str, folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.integrations.jobs", framework, str(folder), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=CEILING,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)], done.stderr


def _if_installed(framework: str) -> Any:
    package, _ = STATES[framework]
    missing = importlib.util.find_spec(package) is None
    reason = f"{package} is not installed; make test-frameworks has it"
    return pytest.param(framework, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results, _ = _job("plain", tmp_path_factory.mktemp("plain"))
    assert results[0] == results[1]
    assert results[0]["codec"] == CODEC
    assert results[0]["steps"] == STEPS
    return results[0]


@pytest.mark.parametrize("framework", [_if_installed(framework) for framework in STATES])
def test_the_bits_of_a_loop_by_hand_and_resume(framework: str, by_hand: dict[str, Any], tmp_path: Path) -> None:
    _, state = STATES[framework]
    folder = tmp_path / "run"
    whole, _ = _job(framework, folder)
    assert whole == [by_hand] * 2
    assert sorted(file.name for file in (folder / state).iterdir()) == [f"rank{r}-of-2.safetensors" for r in range(2)]

    resumed, said = _job(framework, folder, "--resume")
    assert [result["digest"] for result in resumed] == [by_hand["digest"]] * 2
    assert [result["steps"] for result in resumed] == [STEPS] * 2
    assert "residuals begin at zero" not in said

    # What was not sent yet matters: without it the same job ends elsewhere, and says why.
    shutil.rmtree(folder / state)
    without, said = _job(framework, folder, "--resume")
    assert without[0]["digest"] == without[1]["digest"] != by_hand["digest"]
    assert said.count("residuals begin at zero") == 1
