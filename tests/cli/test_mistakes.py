"""Ten typical mistakes: each gets a short sentence that says what is wrong and what would be right, and no traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.cli import main
from thinwire.cli.console import UNEXPECTED

SCRIPT = """
import os
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{os.path.abspath('store')}-{os.getpid()}", rank=0, world_size=1)
DistributedDataParallel(nn.Linear(8, 8))
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("bench kernels --codec 'mirco(density=0.01)'", 1, ["'mirco", "did you mean 'micro'?", "topk"]),
        ("demo --codec 'laplac'", 1, ["'laplac'", "did you mean 'laplace'?"]),
        ("bench kernels --codec 'micro(density=5)'", 1, ["micro(density=5)", "density", "5", "at most 1"]),
        ("bench kernels --density 5", 1, ["density", "at most 1", "5"]),
        ("simulate --profiles profiles.json --density 5", 2, ["--density", "less than or equal to 1"]),
        ("plan --profile none.json", 1, ["no profile", "'none.json'"]),
        ("lab run --nodes 2 --rate fast -- true", 1, ["'fast'", "100mbit"]),
        ("bench step --rates 100mbits", 1, ["'100mbits'", "mbit"]),
        ("bench step --workload gtp", 1, ["'gtp'", "did you mean 'gpt'?", "resnet"]),
        ("bench step --rounds -3", 2, ["--rounds", "greater than or equal to 1"]),
        ("plan --profile folder", 1, ["'folder'", "directory"]),
        ("demo --nodes 1", 2, ["--nodes", "greater than or equal to 2"]),
        ("demo --minutes 0", 2, ["--minutes", "greater than or equal to 0.5"]),
        ("demo --minutes 1 --steps 50", 1, ["--minutes or --steps, not both"]),
        ("demo --rate fast", 1, ["'fast'", "100mbit"]),
        ("demo --report folder", 2, ["--report", "'folder'", "directory, not a file"]),
        ("demo --data short.txt", 1, ["'short.txt' has 5 bytes", "at least 10000"]),
        ("demo --data folder", 1, ["'folder'", "no file"]),
        ("bench kernels --json folder", 2, ["--json", "'folder'", "directory, not a file"]),
        ("bench kernels --json nowhere/x.json", 2, ["no directory 'nowhere'"]),
        ("profile -- no-such-script.sh", 1, ["no command 'no-such-script.sh'"]),
        ("simulat", 2, ["simulat", "simulate"]),
        ("bench stpe", 2, ["stpe", "step"]),
    ],
)
def test_a_mistake(
    words: str,
    code: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["thinwire", *shlex.split(words)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code == code
    _is_a_sentence(shown.err, said)
    assert shown.out == ""


def _is_a_sentence(text: str, said: list[str]) -> None:
    plain = " ".join(text.replace("│", " ").split())
    for part in said:
        assert part in plain, text
    assert "Traceback" not in text
    assert len(plain) < 700, text


def _run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=CEILING, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    done = _run(sys.executable, "-m", "thinwire.run", "tarin.py", folder=tmp_path)
    assert done.returncode == 2
    _is_a_sentence(done.stderr, ["no script 'tarin.py'"])


def test_what_does_not_fit_a_script(tmp_path: Path) -> None:
    """A plan of another model, a codec that there is not: known when the script builds its DDP."""
    from tests.planner import examples
    from thinwire.planner.search import choose

    choose(examples.profile(bits_per_second=1e8)).save(tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = _run(sys.executable, "-m", "thinwire.run", "--plan", "plan.json", "train.py", folder=tmp_path)
    assert done.returncode == 1
    _is_a_sentence(done.stderr, ["thinwire.run: error:", "plan"])
    done = _run(sys.executable, "-m", "thinwire.run", "--codec", "mirco", "train.py", folder=tmp_path)
    assert done.returncode == 1
    _is_a_sentence(done.stderr, ["thinwire.run: error:", "did you mean 'micro'?"])


def test_not_root(tmp_path: Path) -> None:
    """In a user namespace that may make no other: neither root's way to a cluster nor the ordinary user's is open."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-m", "thinwire"]
    done = _run(*inside, "lab", "up", "--nodes", "2", folder=tmp_path)
    if done.stderr.startswith("unshare"):
        pytest.skip(done.stderr)
    assert done.returncode == 1
    _is_a_sentence(done.stderr, ["nothing to keep up", "root", "thinwire doctor"])
    done = _run(*inside, "doctor", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing namespaces" in " ".join(done.stdout.split())
    assert "sysctl user.max_user_namespaces" in done.stdout


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_of_ours(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A profile whose numbers nobody foresaw is one; the traceback is there for who asks."""
    from thinwire.lab import doctor

    def spoilt() -> None:
        raise ZeroDivisionError("by nobody")

    monkeypatch.setattr(doctor, "run", spoilt)
    monkeypatch.delenv("THINWIRE_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["thinwire", *(["--debug"] if debug else []), "doctor"])
    try:
        with pytest.raises(ZeroDivisionError if debug else SystemExit) as ended:
            main()
    finally:
        os.environ.pop("THINWIRE_DEBUG", None)
    if not debug:
        assert ended.value.code == UNEXPECTED  # type: ignore[union-attr]
        _is_a_sentence(capsys.readouterr().err, ["ZeroDivisionError: by nobody", "--debug"])


def test_debug_shows_where_a_known_error_comes_from(tmp_path: Path) -> None:
    done = _run(sys.executable, "-m", "thinwire", "--debug", "plan", "--profile", "none.json", folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ProfileError" in done.stderr
