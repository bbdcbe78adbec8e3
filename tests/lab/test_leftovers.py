"""Nothing is left: not after signals, not, once `lab down --all` has run, after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.lab import Cluster, LabError
from thinwire.lab.leftovers import Record, directories, processes, remove_dead, start_time

from .conftest import BEGIN, MODES, Own, any_mode, left_of, needs_namespaces, own_records, thinwire_lab
from .cycles import cycles


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("mode", MODES)
def test_signals_leave_nothing(own: Own, mode: str, number: signal.Signals) -> None:
    process, identity = own(mode)
    assert left_of(identity)
    process.send_signal(number)
    process.communicate(timeout=CEILING)
    assert process.returncode in (128 + number, -number)
    assert left_of(identity) == []


@pytest.mark.parametrize("mode", MODES)
def test_down_all_removes_what_a_killed_program_left(own: Own, mode: str) -> None:
    living, living_identity = own(mode)
    process, identity = own(mode)
    process.kill()
    process.communicate(timeout=CEILING)
    assert left_of(identity)  # at least the child in a session of its own, and the file
    before = sorted(left_of(living_identity))
    done = thinwire_lab("down", "--all")
    assert done.returncode == 0, done.stderr
    assert identity in done.stderr
    assert living_identity not in done.stderr
    assert left_of(identity) == []
    assert living.poll() is None
    assert sorted(left_of(living_identity)) == before
    assert "nothing to remove" in thinwire_lab("down", "--all").stderr


@needs_namespaces
def test_cycles() -> None:
    assert cycles(count=5, kills=2, mode=str(any_mode()))["ended"] == 3


@needs_namespaces
def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with Cluster(1, mode=any_mode()), Cluster(1, mode="loopback"):
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, before[0])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_handler_of_the_program_stays() -> None:
    def mine(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Cluster(1, mode="loopback"):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@needs_namespaces
def test_without_with_the_end_of_the_program_is_enough() -> None:
    script = BEGIN + "from thinwire.lab import Cluster\nc = Cluster(2, mode=sys.argv[1]).up()\nprint(c.id)\n1 / 0\n"
    done = subprocess.run([sys.executable, "-c", script, str(any_mode())], capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in done.stderr
    assert left_of(done.stdout.strip()) == []


@needs_namespaces
def test_a_forked_child_takes_nothing_away(cluster: Cluster) -> None:
    child = os.fork()
    if not child:
        cluster.down()
        os._exit(0)
    os.waitpid(child, 0)
    assert cluster.calibrate().transfers
    assert left_of(cluster.id)


def test_a_living_process_of_the_same_number_is_another(tmp_path: Path) -> None:
    with Cluster(1, mode="loopback") as cluster:
        (record,) = own_records()
        assert record.alive
        assert record.identity == cluster.id
        assert remove_dead() == []
        imposter = record.path.with_name(f"tw0.{record.pid}.{record.start + 1}")
        imposter.touch()
        assert [dead.identity for dead in remove_dead()] == ["tw0"]
        assert not imposter.exists()
    assert own_records() == []
    assert not directories()[0].exists()


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    directory = directories()[0]
    directory.mkdir()
    (directory / "notes.txt").touch()
    assert own_records() == []
    assert remove_dead() == []
    assert (directory / "notes.txt").exists()


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    directories()[0].symlink_to(tmp_path / "other")
    with pytest.raises(LabError, match="belongs to another user"):
        Record.write("tw0", {})


def test_processes_are_found_by_their_mark() -> None:
    marked = subprocess.Popen(["sleep", "60"], env={**os.environ, "THINWIRE_LAB": "tw00/1"})
    try:
        assert processes("tw00") == {marked.pid}
        assert processes("tw0") == set()
    finally:
        marked.kill()
        marked.wait()
    assert start_time(marked.pid) is None
