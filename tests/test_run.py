"""An unchanged script under `python -m thinwire.run` and under `thinwire profile`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.planner.profile import Profile

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Parallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Parallel(nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 0:  # all ranks have one stdout, in which their lines would mix
    print("steps", step + 1, sys.argv)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _torchrun(*words: str) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    return [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]


def _start(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=CEILING,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def _thinwire(*words: str) -> list[str]:
    return [sys.executable, "-c", "from thinwire.cli import main; main()", *words]


def test_a_profile_of_an_unchanged_script(script: Path, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['SEEN_BY'] = 'the user'")
    script.write_text(SCRIPT.replace("torch.set_num", "import os; assert os.environ['SEEN_BY']; torch.set_num", 1))
    paths = os.pathsep.join(filter(None, [str(own), os.environ.get("PYTHONPATH")]))
    rows = tmp_path / "rows.json"
    words = ["profile", "-o", str(file), "--budget", "2", "--rate", "loopback", "--json", str(rows)]
    words += ["--", *_torchrun(str(script), "50")]
    done = _start(_thinwire(*words), PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    assert "steps 50" not in done.stdout  # it was ended
    profile = Profile.load(file)
    assert profile.cluster.world == 2
    assert profile.cluster.rate == "loopback"
    assert len(profile.tensors) == 4
    assert "micro(density=0.01)" in {cost.codec for cost in profile.codecs}
    assert "all_reduce" in done.stdout
    content = json.loads(rows.read_text())
    assert content["summary"]["ranks"] == 2
    assert {"all_reduce"} <= {row.get("collective") for row in content["rows"]}
    assert {"micro(density=0.01)"} <= {row.get("codec") for row in content["rows"]}


def test_what_cannot_be_profiled(script: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "job.json")
    done = _start(_thinwire("profile", "-o", file, "--", sys.executable, "-c", "print('no DDP')"))
    assert done.returncode == 1
    assert "ended with code 0 before a profile was written" in done.stderr
    assert "must train a DistributedDataParallel" in done.stderr
    done = _start(_thinwire("profile", "-o", file, "--", "no-such-command"))
    assert "there is no command 'no-such-command'" in done.stderr
    done = _start(_thinwire("profile", "-o", "/no/such/place.json", "--", "true"))
    assert "no directory '/no/such'" in done.stderr
    done = _start(_thinwire("profile", "-o", file, "--", *_torchrun(str(script), "3")))
    assert done.returncode == 1  # too few steps
    assert "at least six steps" in done.stderr


def test_run_attaches_to_an_unchanged_script(script: Path) -> None:
    done = _start(_torchrun("-m", "thinwire.run", "--codec", "topk(density=0.1)", str(script), "5", "--odd"))
    assert done.returncode == 0, done.stderr
    assert "topk(density=0.1) on 2 ranks" in done.stderr
    assert f"steps 5 ['{script}', '5', '--odd']" in done.stdout


def test_run_says_what_it_needs(script: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "thinwire.run"]
    assert "give only one of" in _start([*run, "--codec", "dense", "--plan", "x.json", str(script)]).stderr
    assert "there is no plan" in _start([*run, "--plan", str(tmp_path / "none.json"), str(script)]).stderr
    (tmp_path / "bad.json").write_text(json.dumps({"version": 1}))
    assert "is not a plan" in _start([*run, "--plan", str(tmp_path / "bad.json"), str(script)]).stderr
