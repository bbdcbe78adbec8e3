"""Every example runs as its first line says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.limits import CEILING

ROOT = Path(__file__).parents[2]


def test_ddp_example(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "ddp.py")],
        capture_output=True,
        text=True,
        timeout=CEILING,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("auto, quality 'high', 2 ranks\nstep 0: watching DDP alone, without a hook")
    assert re.search(r"\nstep \d+: a step takes ", done.stdout)
    assert "\nnow: " in done.stdout


def test_readme_shows_the_example() -> None:
    readme, example = (ROOT / "README.md").read_text(), (ROOT / "examples" / "ddp.py").read_text()
    for line in (
        "ddp = DistributedDataParallel(torch.nn.Linear(512, 512))",
        "wire = thinwire.attach(ddp)",
    ):
        assert line in readme
        assert line in example


def test_detached_example(tmp_path: Path) -> None:
    """A short run of it: rows for each strength and rate, and detached feedback ahead of none."""
    file = tmp_path / "detached.json"
    options = ["--strengths", "0,0.3,auto", "--lrs", "0.1", "--steps", "120", "--ratio", "16", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "detached.py"), *options],
        capture_output=True,
        text=True,
        timeout=CEILING,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["lam"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == [0.0, 0.3, "auto"]
    assert all((row["lr"], row["ratio"], row["workers"]) == (0.1, 16.0, 8) for row in rows.values())
    assert rows[0.3]["loss"] < rows[0.0]["loss"]
    assert done.stdout.count("\n") == 5


def _run(tmp_path: Path, ranks: int, *words: str) -> str:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=CEILING,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mnist_example(tmp_path: Path) -> None:
    said = _run(tmp_path, 2, "mnist.py", "--epochs", "1", "--codec", "adacomp")
    assert float(said.split("accuracy ")[-1].split(",")[0]) > 0.9


def test_cifar_example(tmp_path: Path) -> None:
    said = _run(tmp_path, 2, "cifar.py", "--epochs", "3")  # before that the accuracy swings, dense too
    assert float(said.split("accuracy ")[-1].split(",")[0]) > 0.5


def test_gpt_example(tmp_path: Path) -> None:
    said = _run(tmp_path, 2, "gpt.py", "--steps", "30", "--journal", str(tmp_path / "run"))
    losses = [float(line.split(": ")[1].split(" nats")[0]) for line in said.splitlines()]
    assert losses[-1] < losses[0]
    assert len(list((tmp_path / "run").glob("*.jsonl"))) == 2


def test_own_codec_example(tmp_path: Path) -> None:
    lines = [line.replace(",", "").split() for line in _run(tmp_path, 1, "own_codec.py").splitlines()]
    rows = {line[0]: (float(line[2]), float(line[3])) for line in lines}
    assert rows["loud(times=2)"][1] < rows["dense"][1] / 5
    assert rows["loud(times=2)"][0] < 0.01
