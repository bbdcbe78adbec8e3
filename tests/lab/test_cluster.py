"""The emulated network: rates, cables, counters, and real jobs on it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.limits import CEILING
from thinwire.lab import Cluster, Job, LabError
from thinwire.lab.calibrate import judged

from .conftest import BEGIN, MODES, SOURCE, host_state, left_of, needs_namespaces

ALL_REDUCE = """
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
tensor = torch.ones(1 << 20)
for _ in range(4):
    torch.distributed.all_reduce(tensor)
print("sum", tensor[0].item())
torch.distributed.destroy_process_group()
"""

MEET = """
import os, socket, time
address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
if rank == 0:
    with socket.create_server(address) as server:
        connection, _ = server.accept()
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
"""

# Rank 0 answers every 256 KB it is sent with one byte; rank 1 says when it came.
TALK = (
    MEET
    + """
data = bytes(1 << 18)
if rank == 0:
    while connection.recv(len(data), socket.MSG_WAITALL):
        connection.sendall(b"x")
else:
    while True:
        connection.sendall(data)
        connection.settimeout(1)
        try:
            connection.recv(1)
            print("took")
        except TimeoutError:
            print("stalled")
            connection.settimeout(40)
            connection.recv(1)
            print("again")
"""
)

# Rank 1 sends without end; rank 0 says how much has come.
STREAM = (
    MEET
    + """
if rank == 0:
    seen, told = 0, 0
    while data := connection.recv(1 << 20):
        seen += len(data)
        if seen > told + (1 << 20):
            print("seen", seen)
            told = seen
else:
    while True:
        connection.sendall(bytes(1 << 18))
"""
)


class Talk:
    """One of the jobs above, and what it says."""

    def __init__(self, cluster: Cluster, job: str = TALK) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        self.job: Job = cluster.start([sys.executable, "-c", job], on_line=lambda rank, line: self.said.put(line))

    def until(self, word: str) -> str:
        while not (line := self.said.get(timeout=CEILING)).startswith(word):
            pass
        return line

    def forget(self) -> None:
        while not self.said.empty():
            self.said.get_nowait()


@pytest.mark.parametrize("mode", MODES)
def test_up_and_down_leave_nothing(mode: str) -> None:
    before = host_state()
    cluster = Cluster(3, rate="10mbit", mode=mode)  # type: ignore[arg-type]
    cluster.up()
    identity = cluster.id
    assert identity.startswith("tw")
    assert cluster.shaped
    assert cluster.mode == mode
    assert host_state() == before
    assert left_of(identity)
    with pytest.raises(LabError, match="up already"):
        cluster.up()
    cluster.down()
    cluster.down()
    assert left_of(identity) == []
    assert host_state() == before
    with cluster:  # and once more
        assert cluster.id not in ("", identity)


@pytest.mark.parametrize("mode", MODES)
def test_all_reduce_sends_what_it_should(mode: str) -> None:
    with Cluster(2, rate="1gbit", mode=mode) as cluster:  # type: ignore[arg-type]
        result = cluster.run([sys.executable, "-c", ALL_REDUCE], timeout=CEILING, on_line=lambda rank, line: None)
    assert result.code == 0, result.lines
    assert result.lines == [["sum 16.0"]] * 2
    expected = 4 * (1 << 20) * 4  # each of two ranks sends one buffer a round: half reduced, half gathered
    for traffic in result.traffic:
        payload = traffic.bytes_sent - 66 * traffic.packets_sent
        assert expected <= payload < 1.03 * expected


@needs_namespaces
def test_ranks_of_one_node_use_its_loopback() -> None:
    with Cluster(1, ranks_per_node=2) as single:
        result = single.run([sys.executable, "-c", ALL_REDUCE], timeout=CEILING, on_line=lambda rank, line: None)
    assert result.lines == [["sum 16.0"]] * 2
    assert result.traffic[0].bytes_sent < 10_000


@needs_namespaces
def test_counters_start_at_nothing(cluster: Cluster) -> None:
    assert all(counters.bytes_sent == 0 for counters in cluster.counters())


@needs_namespaces
def test_a_rate_that_falls_does_not_stop_a_full_link(cluster: Cluster) -> None:
    """Large packets wait in a queue when its bucket becomes smaller than they are."""
    cluster.set_rate("1gbit")
    talk = Talk(cluster, STREAM)
    talk.until("seen")
    for rate in ("100mbit", "1gbit", "20mbit"):
        time.sleep(0.3)
        cluster.set_rate(rate)
        time.sleep(0.3)
        talk.forget()
        talk.until("seen")
        talk.until("seen")
    talk.job.stop()


def _buckets(cluster: Cluster) -> list[int | None]:
    """Bits a second that the token bucket of each node's interface lets pass, as the kernel has it; None without one."""
    result = cluster.run(["tc", "-j", "qdisc", "show", "dev", "eth0"], on_line=lambda rank, line: None)
    found = [json.loads("".join(lines))[0] for lines in result.lines]
    return [8 * qdisc["options"]["rate"] if qdisc["kind"] == "tbf" else None for qdisc in found]


@needs_namespaces
def test_rate_changes_while_a_job_runs(cluster: Cluster) -> None:
    assert _buckets(cluster) == [1_000_000_000] * 2
    talk = Talk(cluster)
    for rate, node, expected in (
        ("50mbit", None, [50_000_000, 50_000_000]),
        ("1gbit", None, [1_000_000_000, 1_000_000_000]),
        ("50mbit", 1, [1_000_000_000, 50_000_000]),
        (None, None, [None, None]),
    ):
        cluster.set_rate(rate, node=node)
        assert _buckets(cluster) == expected
        assert cluster.shaped == (rate is not None)
        talk.forget()
        for _ in range(3):
            talk.until("took")
    talk.job.stop()


@needs_namespaces
def test_cut_stalls_and_join_repairs(cluster: Cluster) -> None:
    talk = Talk(cluster)
    talk.until("took")
    cluster.cut(1)
    talk.until("stalled")
    cluster.join(1)
    talk.until("again")
    talk.until("took")
    talk.job.stop()


@needs_namespaces
def test_calibration(cluster: Cluster) -> None:
    cluster.set_rate("20mbit")
    slow = cluster.calibrate()
    assert [transfer.bytes for transfer in slow.transfers[:2]] == [65536, 262144]
    assert slow.transfers[-1].duplex
    assert "20mbit" in str(slow)
    assert slow.as_dict()["transfers"][0]["bytes"] == 65536
    cluster.set_rate("none")
    fast = cluster.calibrate()
    assert fast.good, "nothing was promised"
    assert fast.measured is not None


def test_what_a_calibration_says() -> None:
    """A link with its rate, one whose bucket is too large, one that the machine cannot keep busy, and one without a rate."""
    plan = [(64 << 10, False, 3), (4 << 20, False, 1), (4 << 20, True, 1)]
    right = judged(100_000_000, plan, [[0.0056, 0.0055, 0.9], [0.352], [0.36]], shaped=True)
    assert right.good
    assert right.measured == pytest.approx(4 * 8 * (1 << 20) / 0.352)
    burst = judged(100_000_000, plan, [[0.0021, 0.0022, 0.9], [0.352], [0.36]], shaped=True)
    assert [transfer.good for transfer in burst.transfers] == [False, True, True]
    assert "64 KB 238.3mbit (2.38, off)" in str(burst)
    slow = judged(100_000_000, plan, [[0.0056] * 3, [0.352], [0.42]], shaped=True)
    assert [transfer.good for transfer in slow.transfers] == [True, True, False]
    assert not judged(100_000_000, plan, [[0.0056] * 3, [0.352], [0.36]], shaped=False).good
    assert judged(None, plan, [[0.5] * 3, [9.0], [0.1]], shaped=False).good


@needs_namespaces
def test_nodes_have_names(cluster: Cluster) -> None:
    script = "import os, socket; print(os.uname().nodename, socket.gethostbyname('node1'))"
    result = cluster.run([sys.executable, "-c", script], on_line=lambda rank, line: None)
    assert result.lines == [["node0 10.87.0.2"], ["node1 10.87.0.2"]]


@needs_namespaces
def test_wrong_node(cluster: Cluster) -> None:
    with pytest.raises(LabError, match="node 2 does not exist: the cluster has nodes 0 to 1"):
        cluster.cut(2)
    with pytest.raises(LabError, match="node -1"):
        cluster.set_rate("1gbit", node=-1)


def test_wrong_sizes() -> None:
    with pytest.raises(LabError, match="0 nodes"):
        Cluster(0)
    with pytest.raises(LabError, match="-1 ranks"):
        Cluster(1, -1)
    with pytest.raises(LabError, match="'sudo'"):
        Cluster(1, mode="sudo")  # type: ignore[arg-type]
    with pytest.raises(LabError, match="not up"):
        Cluster(1).run(["true"])


def test_loopback_is_marked() -> None:
    with Cluster(2, rate="1gbit", mode="loopback") as cluster:
        assert not cluster.shaped
        assert cluster.why
        result = cluster.run(["sh", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME"], on_line=lambda rank, line: None)
        assert result.lines == [["127.0.0.1 lo"]] * 2
        assert result.traffic == cluster.counters() == []
        assert not cluster.calibrate().good
        with pytest.raises(LabError, match="needs network namespaces"):
            cluster.cut(1)


@needs_namespaces
def test_links_that_cannot_be_shaped_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "tc"
    broken.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2; exit 2\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Cluster(2, rate="1gbit") as cluster:
        assert not cluster.shaped
        assert "qdisc kind is unknown" in cluster.why
        assert not cluster.calibrate().good
        with pytest.raises(LabError, match="unknown"):
            cluster.set_rate("10mbit")


WHERE_AM_I = BEGIN + "from thinwire.lab import Cluster\nwith Cluster(2) as c: print(c.mode, c.shaped, c.why)"


def test_falls_back_where_nothing_is_allowed(tmp_path: Path) -> None:
    """In a user namespace that may make no other: neither root's way nor the ordinary user's is open."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh", sys.executable, "-c", WHERE_AM_I]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=CEILING, check=False)
    if done.stderr.startswith("unshare"):
        pytest.skip(done.stderr)
    assert done.stdout.startswith("loopback False as root: "), done.stderr
    assert "as rootless: " in done.stdout
    assert "jobs run unshaped" in done.stderr


def test_falls_back_without_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WHERE_AM_I], env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("loopback False"), done.stderr
    assert "install" in done.stderr


@pytest.mark.skipif("not __import__('os').geteuid() == 0", reason="only root can become somebody else")
def test_an_ordinary_user_needs_no_root() -> None:
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
    script = (
        f"sys.path.insert(0, {str(SOURCE)!r})\n"
        "from thinwire.lab import Cluster\n"
        "with Cluster(2, rate='1gbit') as c:\n"
        "    r = c.run(['sh', '-c', 'test $RANK = 0 || exit 3; sleep 600'])\n"
        "    print(c.mode, c.shaped, r.code, c.id)\n"
    )
    for python in (sys.executable, "/usr/bin/python3"):
        # Through a shell: the first program after setpriv still has root's rights to be found.
        words = [*become, "sh", "-c", 'exec "$@"', "sh", python]
        able = "import sys, pathlib; sys.exit(sys.version_info < (3, 11)); "
        check = subprocess.run([*words, "-c", able], capture_output=True, check=False)
        readable = subprocess.run([*become, "test", "-r", str(SOURCE / "thinwire/errors.py")], check=False)
        if check.returncode == readable.returncode == 0:
            break
    else:
        pytest.skip("no python that another user may run")
    done = subprocess.run([*words, "-c", BEGIN + script], capture_output=True, text=True, timeout=CEILING, check=False)
    if done.stdout.startswith("loopback"):
        pytest.skip(f"ordinary users may make no namespaces here: {done.stderr}")
    mode, shaped, code, identity = done.stdout.split()
    assert (mode, shaped, code) == ("rootless", "True", "3"), done.stderr
    assert left_of(identity) == []
