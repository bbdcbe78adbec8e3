"""The machinery of the suite itself: what hangs is one failure that says where, and the other tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The limits are those of these small suites: whatever hangs in them hangs for ever.
SETTINGS = """
[pytest]
timeout = 20
timeout_method = signal
watchdog_grace = 1
"""

ONE_RANK_HANGS = """
import threading
import torch.distributed as dist
from tests.ranks import run

def waits_for_the_other():
    dist.barrier()

def never_comes():
    threading.Event().wait()

def job():
    never_comes() if dist.get_rank() == 1 else waits_for_the_other()

def test_hangs():
    run(2, dist.get_rank)  # with the default limit: the ranks are up
    run(2, job, hang=5.0)

def test_passes():
    pass
"""

A_TEST_HANGS = """
import threading

def forever():
    threading.Event().wait()

def test_hangs():
    forever()

def test_passes():
    pass
"""

# The interpreter lock is held, no signal interrupts it, and no CPU time is used.
STUCK_IN_C = """
import ctypes

def locks_twice():
    mutex = ctypes.create_string_buffer(128)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def test_hangs():
    locks_twice()

def test_passes():
    pass
"""


def _suite(folder: Path, text: str, timeout: int = 20) -> str:
    """What pytest says about a suite of one file, in which one test fails and one passes."""
    (folder / "test_small.py").write_text(text)
    (folder / "pytest.ini").write_text(SETTINGS.replace("20", str(timeout)))
    words = [sys.executable, "-m", "pytest", "-p", "tests.support.watchdog", "-p", "no:cacheprovider", "-n", "1"]
    path = os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*words, "-rfp", str(folder)],
        cwd=folder,
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_small.py::test_hangs" in done.stdout
    assert "PASSED test_small.py::test_passes" in done.stdout
    assert done.returncode == 1
    return done.stdout


def test_a_hang_on_one_rank_shows_the_stacks_of_all(tmp_path: Path) -> None:
    text = _suite(tmp_path, ONE_RANK_HANGS, timeout=600)
    assert "RankError: ranks [0, 1] hang (no progress for 5 s)" in text
    first, second = text.split("stacks of rank 0:")[1].split("stacks of rank 1:")
    assert "in waits_for_the_other" in first
    assert "in never_comes" in second


def test_a_timeout_is_one_failure(tmp_path: Path) -> None:
    text = _suite(tmp_path, A_TEST_HANGS, timeout=1)
    assert "Failed: Timeout" in text
    assert "in forever" in text or "forever()" in text


def test_a_test_stuck_in_c_is_one_failure(tmp_path: Path) -> None:
    text = _suite(tmp_path, STUCK_IN_C, timeout=1)
    assert "crashed while running" in text
    assert "in locks_twice" in text.split("The watchdog has ended it, stuck in:")[1]
