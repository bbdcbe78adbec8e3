"""An emulated cluster on this machine: nodes joined by links of a chosen rate, and jobs that run on them."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from . import signals
from .calibrate import Calibration, calibrate
from .launch import Job, OnLine, Rank, Result
from .leftovers import MARK, Record, end_processes
from .netns import Counters, LabError, Network, Owner, format_rate, parse_rate

log = logging.getLogger("thinwire.lab")

Mode = Literal["root", "rootless", "loopback"]
FIRST_PORT = 29500


class Cluster:
    """`nodes` machines at one switch, links shaped to `rate` in both directions, `ranks_per_node` processes on each.

        with Cluster(nodes=2, rate="100mbit") as cluster:
            print(cluster.calibrate())
            result = cluster.run(["python", "train.py"])

    Needs root or user namespaces. Without either, `mode` is "loopback", `shaped` is False and `why` gives the reason: jobs
    run, but their times do not reflect the rate. Everything is removed by `down`, at the end of the `with` block, at the end
    of the program, and after Ctrl-C, SIGTERM and SIGHUP, which raise in the main thread while a cluster is up. Leftovers of a
    killed program are removed by `thinwire lab down --all`.
    """

    def __init__(
        self,
        nodes: int = 4,
        ranks_per_node: int = 1,
        rate: str | None = "1gbit",
        *,
        mode: Mode | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if not 1 <= nodes <= 1000:
            raise LabError(f"a cluster of {nodes} nodes cannot be made: choose 1 to 1000 (a bridge has 1023 ports)")
        if not 1 <= ranks_per_node <= 1000:
            raise LabError(f"{ranks_per_node} ranks per node cannot be started: choose 1 to 1000")
        if mode not in (None, "root", "rootless", "loopback"):
            raise LabError(f"mode {mode!r} does not exist: choose 'root', 'rootless' or 'loopback', or leave it out")
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.rates: list[int | None] = [parse_rate(rate)] * nodes
        self.id = ""
        self.mode: Mode = mode or "loopback"
        self.shaped = False
        self.why = ""  # the reason if the cluster differs from the request
        self._wanted_mode = mode
        self._about = dict(about or {})
        self._process = 0
        self._record: Record | None = None
        self._network: Network | None = None
        self._owner: Owner | None = None
        self._jobs: list[Job] = []
        self._jobs_started = 0
        self._ports_used = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    # Up and down.

    def up(self) -> Self:
        if self._record is not None:
            raise LabError(f"the cluster {self.id} is up already")
        self.id = "tw" + secrets.token_hex(4)
        self._process = os.getpid()
        try:
            signals.watch(self)
            atexit.register(self.down)
            self._record = Record.write(self.id, {"nodes": self.nodes, "rate": self.rate, **self._about})
            self._build()
        except BaseException:
            self.down()
            raise
        return self

    def down(self) -> None:
        """Stop all jobs and remove everything. Does nothing when called again or in a forked child."""
        if not self.id or self._process != os.getpid():
            return
        try:
            with signals.undisturbed():
                for job in self._jobs:
                    job.stop()
                self._jobs.clear()
                end_processes(self.id, self._network.nodes if self._network and self.mode == "root" else [])
                self._dismantle()
                # Last: if something above fails, `lab down --all` can still find the rest.
                if self._record is not None:
                    self._record.remove()
                    self._record = None
                self.id = ""
                atexit.unregister(self.down)
        finally:
            signals.unwatch(self)

    def __enter__(self) -> Self:
        return self.up()

    def __exit__(self, *_: object) -> None:
        self.down()

    def _build(self) -> None:
        wanted: list[Mode] = ["rootless", "loopback"] if os.geteuid() else ["root", "rootless", "loopback"]
        if self._wanted_mode is not None:
            wanted = [self._wanted_mode]
        reasons = []
        for mode in wanted:
            self.mode = mode
            try:
                if mode != "loopback":
                    self._build_network(mode)
                break
            except LabError as error:
                with contextlib.suppress(LabError):  # without `ip` nothing was created
                    self._dismantle()
                self._network = None
                if self._wanted_mode is not None:
                    raise
                reasons.append(f"as {mode}: {error}")
        if self.mode == "loopback":
            self.why = "; ".join(reasons) or "requested"
            log.warning("no network namespaces (%s): jobs run unshaped over loopback, not at %s", self.why, self.rate)
            return
        try:
            self._shape(range(self.nodes))
        except LabError as error:  # a kernel without tbf, or no `tc`
            self.why = str(error)
            log.warning("links cannot be shaped (%s): jobs run at any rate, not at %s", self.why, self.rate)

    def _build_network(self, mode: Mode) -> None:
        if mode == "rootless":
            self._owner = Owner({MARK: f"{self.id}/owner"})
        self._network = Network(self.id, self.nodes, self._owner.prefix if self._owner else [])
        self._network.create()

    def _dismantle(self) -> None:
        if self._network is not None and self.mode == "root":
            self._network.remove()
        if self._owner is not None:
            self._owner.close()  # the kernel removes the namespaces with their last process
        self._network = self._owner = None
        self.shaped = False

    # The network.

    @property
    def rate(self) -> str:
        """The rate of all links as text; a list if they differ."""
        different = sorted(set(map(format_rate, self.rates)))
        return ", ".join(different)

    def set_rate(self, rate: str | None, node: int | None = None) -> None:
        """Change the rate of one or all links, also while a job runs. Connections stay open."""
        bits = parse_rate(rate)
        nodes = range(self.nodes) if node is None else [self._check(node)]
        self._needed("set_rate")
        for each in nodes:
            self.rates[each] = bits
        self._shape(nodes)

    def _shape(self, nodes: range | list[int]) -> None:
        network = self._needed("shaping")
        network.shape({node: self.rates[node] for node in nodes})
        self.shaped = any(rate is not None for rate in self.rates)

    def cut(self, node: int) -> None:
        """Unplug a node: all its traffic is lost."""
        self._needed("cut").cable(self._check(node), plugged=False)

    def join(self, node: int) -> None:
        """Plug a node in again. Connections that have not timed out continue when TCP retransmits."""
        self._needed("join").cable(self._check(node), plugged=True)

    def counters(self) -> list[Counters]:
        """Traffic of each node since `up`, without loopback. Empty without namespaces."""
        return self._network.counters() if self._network is not None else []

    def calibrate(self, sender: int = 0, receiver: int = 1) -> Calibration:
        """Measure the link between two nodes with TCP transfers, one way and both ways."""
        self._up()
        if self.nodes == 1:
            return Calibration(self.rates[0], [])
        ends = {True: self._check(receiver), False: self._check(sender)}
        rates = [rate for rate in (self.rates[sender], self.rates[receiver]) if rate is not None]
        port = self._port()

        def start(name: str, command: list[str], listens: bool) -> Rank:
            node = ends[listens]
            environment = {**os.environ, MARK: f"{self.id}/{name}"}
            return self._rank(int(not listens), node, command, environment, self._cores(node, 0))

        return calibrate(min(rates, default=None), self.address(receiver), port, start, self.shaped)

    def address(self, node: int) -> str:
        return Network.address(self._check(node)) if self._network is not None else "127.0.0.1"

    def enter(self, node: int) -> list[str]:
        """The prefix that makes a command run on a node."""
        self._up()
        return [] if self._network is None else self._network.inside(self._check(node))

    def _rank(
        self, rank: int, node: int, command: list[str], environment: dict[str, str], cores: tuple[int, ...]
    ) -> Rank:
        network = self._network
        if network is None:
            return Rank(rank, command, environment, cores=cores)
        return Rank(rank, command, environment, network.inside(node), cores, f"node{node}", network.hosts())

    # Jobs.

    def start(
        self,
        command: list[str],
        env: Mapping[str, str] | None = None,
        *,
        pin: bool = True,
        on_line: OnLine | None = None,
        directory: str | None = None,
    ) -> Job:
        """Start `command` on every rank, with the environment variables that torchrun sets, and return at once.

        Output lines are printed with the rank as prefix, or passed to `on_line(rank, line)`, in another thread. `pin` assigns
        a core per rank, or per node, if there are enough; `Result.pinned` tells whether there were.
        """
        self._up()
        if not command:
            raise LabError("there is no command to run: give a list like ['python', 'train.py']")
        self._jobs = [job for job in self._jobs if job.running]
        self._jobs_started += 1
        master = {"MASTER_ADDR": self.address(0), "MASTER_PORT": str(self._port())}
        ranks = []
        for rank in range(self.world_size):
            node, local = divmod(rank, self.ranks_per_node)
            environment = {
                **os.environ,
                **master,
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(self.nodes),
                "NODE_RANK": str(node),
                "GLOO_SOCKET_IFNAME": "eth0" if self._network is not None else "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
                MARK: f"{self.id}/{self._jobs_started}",
            }
            cores = self._cores(node, local) if pin else ()
            ranks.append(self._rank(rank, node, command, environment, cores))
        pinned = all(rank.cores for rank in ranks)
        job = Job(ranks, directory=directory, on_line=on_line, pinned=pinned, counters=self.counters)
        self._jobs.append(job)
        return job

    def run(
        self,
        command: list[str],
        env: Mapping[str, str] | None = None,
        *,
        pin: bool = True,
        timeout: float | None = None,
        on_line: OnLine | None = None,
        directory: str | None = None,
    ) -> Result:
        """Run `command` on every rank to its end. The first rank that fails ends the others; its exit code is the result's."""
        job = self.start(command, env, pin=pin, on_line=on_line, directory=directory)
        try:
            return job.wait(timeout)
        finally:
            job.stop()

    def _cores(self, node: int, local: int) -> tuple[int, ...]:
        cores = _cores()
        if len(cores) >= self.world_size:
            return (cores[node * self.ranks_per_node + local],)
        return (cores[node],) if len(cores) >= self.nodes else ()

    def _port(self) -> int:
        if self._network is not None:
            # Ports in namespaces are free; consecutive jobs use different ones because of sockets in TIME_WAIT.
            self._ports_used += 1
            return FIRST_PORT + self._ports_used % 1000
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    def _check(self, node: int) -> int:
        if not 0 <= node < self.nodes:
            raise LabError(f"node {node} does not exist: the cluster has nodes 0 to {self.nodes - 1}")
        return node

    def _up(self) -> None:
        if self._record is None:
            raise LabError("the cluster is not up: use `with Cluster(...) as cluster`, or call `up()`")

    def _needed(self, what: str) -> Network:
        self._up()
        if self._network is None:
            raise LabError(f"{what} needs network namespaces, which are not available here: {self.why}")
        return self._network


def _cores() -> list[int]:
    """The cores this process may use; second hyperthreads come last."""
    seen: set[str] = set()
    first: list[int] = []
    second: list[int] = []
    for core in sorted(os.sched_getaffinity(0)):
        siblings = str(core)
        with contextlib.suppress(OSError):
            siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        (second if siblings in seen else first).append(core)
        seen.add(siblings)
    return first + second
