"""What the tests of the lab share: clusters, programs that own one, and the search for what they left."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.lab import Cluster, LabError
from thinwire.lab.cluster import Mode
from thinwire.lab.leftovers import Record, directories, processes, records
from thinwire.lab.netns import list_namespaces

EVERY_MODE: tuple[Mode, ...] = ("root", "rootless")
SOURCE = Path(__file__).parents[2] / "src"

# What a program of the tests begins with. A job in the background inherits that signals are ignored.
BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""

# A program with a cluster and a job on it, whose ranks have children, one of them in a session of its own.
OWNER = (
    BEGIN
    + """
from thinwire.lab import Cluster
with Cluster(2, rate="1gbit", mode=sys.argv[1]) as cluster:
    print(cluster.id, flush=True)
    cluster.run(["sh", "-c", "sleep 600 & setsid sleep 600 & echo ready; sleep 600"])
"""
)

COMMAND = BEGIN + "from thinwire.cli.lab import app\napp()\n"


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these clusters go where no other cluster of this machine has its own."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


@functools.cache
def _impossible(mode: Mode) -> str:
    try:
        with Cluster(1, rate="1gbit", mode=mode):
            return ""
    except LabError as error:
        return str(error)


@functools.cache
def any_mode() -> Mode | None:
    """A mode in which there are clusters with namespaces here; found out when it is first asked for."""
    return next((mode for mode in EVERY_MODE if not _impossible(mode)), None)


def why_none(mode: Mode | None = None) -> str:
    """Why there are no clusters with namespaces here; empty where there are."""
    if mode is not None:
        return (why := _impossible(mode)) and f"no {mode} cluster here: {why}"
    return "" if any_mode() else f"no network namespaces here: { ({mode: _impossible(mode) for mode in EVERY_MODE}) }"


MODES = [pytest.param(mode, marks=pytest.mark.namespaces(mode)) for mode in EVERY_MODE]
needs_namespaces = pytest.mark.namespaces  # skipped by tests/conftest.py where there are none


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(2, rate="1gbit", mode=any_mode()) as made:
        yield made


def left_of(identity: str) -> list[str]:
    """Namespaces, processes and files of a cluster; empty when it is gone."""
    found = [name for name in list_namespaces() if name.startswith(identity)]
    found += [f"process {pid}" for pid in processes(identity)]
    for directory in directories():
        if directory.is_dir():
            found += [str(path) for path in directory.iterdir() if path.name.startswith(identity)]
    return found


def own_records() -> list[Record]:
    """The clusters of this test: others may have theirs on this machine at the same time."""
    own = Path(os.environ["XDG_RUNTIME_DIR"])
    return [record for record in records() if record.path.is_relative_to(own)]


def host_state() -> tuple[set[str], str]:
    """The host's own interfaces and /etc/hosts, which no cluster may touch."""
    interfaces = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in interfaces.splitlines()}, Path("/etc/hosts").read_text() + os.uname().nodename


Own = Callable[[str], tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def own() -> Iterator[Own]:
    """Starts a program with a cluster and waits until its job runs; gives the process and the cluster's name."""
    started: list[subprocess.Popen[str]] = []

    def start(mode: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen([sys.executable, "-c", OWNER, mode], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        identity = process.stdout.readline().strip()
        ready = {process.stdout.readline().strip() for _ in range(2)}
        assert ready == {"[0] ready", "[1] ready"}
        return process, identity

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=CEILING)


def thinwire_lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, timeout=CEILING, check=False
    )
