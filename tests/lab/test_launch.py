"""Jobs: the environment of a rank, its output, and how everything ends when one of them does."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.lab import Cluster, Job
from thinwire.lab.launch import Rank
from thinwire.lab.leftovers import start_time

from .conftest import any_mode, needs_namespaces


def quiet(rank: int, line: str) -> None:
    pass


def shell(script: str, ranks: int = 2) -> list[Rank]:
    return [Rank(rank, ["sh", "-c", script], {**os.environ, "RANK": str(rank)}) for rank in range(ranks)]


def test_environment() -> None:
    script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $NODE_RANK $OMP_NUM_THREADS $EXTRA"
    mode = any_mode() or "loopback"
    with Cluster(2, ranks_per_node=2, mode=mode) as cluster:  # type: ignore[arg-type]
        result = cluster.run(["sh", "-c", script], {"EXTRA": "more"}, on_line=quiet)
    assert result.lines == [
        ["0 0 4 2 0 0 1 more"],
        ["1 1 4 2 0 0 1 more"],
        ["2 0 4 2 1 1 1 more"],
        ["3 1 4 2 1 1 1 more"],
    ]


def test_pinned_only_if_there_are_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    script = "import os; print(len(os.sched_getaffinity(0)))"
    with Cluster(cores, mode="loopback") as cluster:
        result = cluster.run([sys.executable, "-c", script], on_line=quiet)
        assert result.pinned
        assert result.lines == [["1"]] * cores
        assert not cluster.run(["true"], pin=False).pinned
    with Cluster(cores + 1, mode="loopback") as cluster:
        result = cluster.run([sys.executable, "-c", script], on_line=quiet)
        assert not result.pinned
        assert result.lines == [[str(cores)]] * (cores + 1)


def test_output_has_the_rank_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    script = r"echo one; echo two >&2; printf '10%%\r20%%\n'; printf 'no end'"
    result = Job(shell(script)).wait(CEILING)
    for rank in range(2):
        assert result.lines[rank] == ["one", "two", "20%", "no end"]
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[1]")] == ["[1] one", "[1] two", "[1] 20%", "[1] no end"]


def test_large_output_arrives() -> None:
    result = Job(shell("seq 1 9999; echo end"), on_line=quiet).wait(CEILING)
    assert result.lines[1] == [*map(str, range(1, 10000)), "end"]


def test_a_failing_rank_ends_all() -> None:
    result = Job(shell("if [ $RANK = 1 ]; then exit 7; fi; sleep 600", ranks=4), on_line=quiet).wait(CEILING)
    assert (result.code, result.failed_rank) == (7, 1)
    assert result.codes == [143, 7, 143, 143]


def test_a_killed_rank_has_the_code_of_a_shell() -> None:
    result = Job(shell("if [ $RANK = 0 ]; then kill -9 $$; fi; sleep 600"), on_line=quiet).wait(CEILING)
    assert (result.code, result.failed_rank) == (137, 0)


def test_who_does_not_listen_is_killed() -> None:
    ready = threading.Semaphore(0)
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    job = Job(shell(script), on_line=lambda rank, line: ready.release(), grace=0.3)
    for _ in range(2):
        assert ready.acquire(timeout=CEILING)
    result = job.wait(0.01)
    assert result.timed_out
    assert (result.code, result.codes) == (124, [137, 137])
    assert not job.running


def test_children_of_a_rank_end_with_it() -> None:
    result = Job(shell("sleep 600 & echo $!"), on_line=quiet).wait(CEILING)
    assert result.code == 0
    assert [start_time(int(lines[0])) for lines in result.lines] == [None, None]


def test_a_missing_command_says_so() -> None:
    result = Job([Rank(0, ["no-such-command"], dict(os.environ))], on_line=quiet).wait(CEILING)
    assert result.code == 127
    assert "'no-such-command'" in result.lines[0][0]


def test_an_error_in_on_line_ends_the_job() -> None:
    def fail(rank: int, line: str) -> None:
        raise ZeroDivisionError(line)

    job = Job(shell("echo hello; sleep 600"), on_line=fail)
    with pytest.raises(ZeroDivisionError, match="hello"):
        job.wait(CEILING)
    assert all(start_time(pid) is None for pid in job.pids)


def test_ranks_outlive_the_thread_that_asked_for_them(tmp_path: Path) -> None:
    jobs: list[Job] = []
    script = f"while [ ! -e {tmp_path / 'go'} ]; do sleep 0.02; done; echo done"
    thread = threading.Thread(target=lambda: jobs.append(Job(shell(script), on_line=quiet)))
    thread.start()
    thread.join()
    (tmp_path / "go").touch()
    assert jobs[0].wait(CEILING).lines == [["done"]] * 2


def test_no_descriptor_is_left_open() -> None:
    Job(shell("true"), on_line=quiet).wait(CEILING)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        Job(shell("true"), on_line=quiet).wait(CEILING)
    assert set(os.listdir("/proc/self/fd")) == before


def test_no_process_outlives_the_cluster() -> None:
    with Cluster(2, mode="loopback") as cluster:
        result = cluster.run(["sh", "-c", "setsid sleep 600 > /dev/null & echo $!"], on_line=quiet)
    assert [start_time(int(lines[0])) for lines in result.lines] == [None, None]


@needs_namespaces
def test_jobs_may_run_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    script = "echo $MASTER_PORT; while [ ! -e %s ]; do sleep 0.02; done"
    first = cluster.start(["sh", "-c", script % (tmp_path / "go")], on_line=quiet)
    second = cluster.start(["sh", "-c", script % (tmp_path / "go")], on_line=quiet)
    (tmp_path / "go").touch()
    ports = {line for job in (first, second) for lines in job.wait(CEILING).lines for line in lines}
    assert len(ports) == 2


@needs_namespaces
def test_down_ends_a_running_job(cluster: Cluster) -> None:
    ready = threading.Event()
    job = cluster.start(["sh", "-c", "echo ready; sleep 600"], on_line=lambda rank, line: ready.set())
    assert ready.wait(CEILING)
    cluster.down()
    assert not job.running
