"""Starts the ranks of a job, forwards their output by line, and stops all ranks when one fails."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .netns import Counters

GRACE_SECONDS = 5.0
KEPT_LINES = 10_000
TIMED_OUT = 124  # as timeout(1) has it

OnLine = Callable[[int, str], None]


def print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", flush=True)


@dataclass(frozen=True)
class Rank:
    """How a process of a job is started; `prefix` is the command that enters its namespace."""

    rank: int
    command: list[str]
    environment: dict[str, str]
    prefix: list[str] = field(default_factory=list)
    cores: tuple[int, ...] = ()
    host: str = ""  # the name of its node, in namespaces
    hosts: str = ""  # what its /etc/hosts says


@dataclass(frozen=True)
class Result:
    """How a job ended. Exit codes follow the shell: 128 plus the signal for a killed rank."""

    code: int  # of the rank that failed first; 0 if none did; 124 after a timeout
    codes: list[int]
    failed_rank: int | None
    timed_out: bool
    seconds: float
    pinned: bool
    lines: list[list[str]]  # of each rank, the last 10 000
    traffic: list[Counters]  # of each node, during the job; empty without namespaces


class _Process:
    def __init__(self, rank: Rank, directory: str) -> None:
        cores = ",".join(map(str, rank.cores)) or "any"
        enter = [sys.executable, "-I", "-S", str(Path(__file__).with_name("enter.py")), str(os.getpid()), cores]
        enter += [rank.host, rank.hosts, directory]
        self.rank = rank.rank
        self.popen = subprocess.Popen(
            [*rank.prefix, *enter, *rank.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=rank.environment,
            start_new_session=True,  # a process group, so that signals reach its children
        )
        assert self.popen.stdout is not None
        self.pipe = self.popen.stdout.fileno()
        os.set_blocking(self.pipe, False)
        self.pidfd = os.pidfd_open(self.popen.pid)
        self.code: int | None = None
        self.open = True
        self.partial = b""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def signal(self, number: int) -> None:
        # Until `reap`, the id of the process group cannot be reused.
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, number)

    def reap(self) -> None:
        self.signal(signal.SIGKILL)  # remaining children
        code = self.popen.wait()
        self.code = code if code >= 0 else 128 - code

    def close(self) -> None:
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        os.close(self.pidfd)


class Job:
    """The running processes of a command. `wait` for the result, or `stop` it.

    One thread starts, supervises and stops them: the kernel ties a rank's death signal to the thread that started it.
    """

    def __init__(
        self,
        ranks: list[Rank],
        *,
        directory: str | None = None,
        on_line: OnLine | None = None,
        grace: float = GRACE_SECONDS,
        pinned: bool = False,
        counters: Callable[[], list[Counters]] = list,
    ) -> None:
        self._ranks = ranks
        self._directory = directory or os.getcwd()
        self._on_line = on_line or print_line
        self._grace = grace
        self._pinned = pinned
        self._counters = counters
        self._processes: list[_Process] = []
        self._first_failed: _Process | None = None
        self._error: BaseException | None = None
        self._result: Result | None = None
        self._deadline: float | None = None  # time of SIGKILL after SIGTERM
        self._stop_asked = False
        self._timed_out = False
        self._started_at = time.monotonic()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._done = threading.Event()
        self._closing = threading.Lock()  # guards the eventfd against writes after it is closed
        self._thread = threading.Thread(target=self._supervise, name="thinwire-lab-job", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in list(self._processes)]

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the result; after `timeout` seconds the ranks are stopped, with code 124."""
        if not self._done.wait(timeout):
            self._timed_out = True
            self.stop()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self) -> None:
        """Stop all ranks (SIGTERM, after the grace period SIGKILL) and wait until they are gone."""
        self._stop_asked = True
        with self._closing:
            if not self._done.is_set():
                os.eventfd_write(self._wake, 1)
        self._done.wait()

    def _supervise(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            try:
                before = self._counters()
                for rank in self._ranks:
                    if self._stop_asked:
                        break
                    process = _Process(rank, self._directory)
                    self._processes.append(process)
                    selector.register(process.pipe, selectors.EVENT_READ, process)
                    selector.register(process.pidfd, selectors.EVENT_READ, process)
                self._watch(selector)
                self._result = self._conclude(before)
            except BaseException as error:  # from on_line, or from starting a process
                self._error = error
            finally:
                for process in self._processes:
                    if process.code is None:
                        process.reap()
                    process.close()
                with self._closing:
                    self._done.set()
                    os.close(self._wake)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        drained_by = None  # a child in another session may keep a pipe open indefinitely
        while any(process.code is None or process.open for process in self._processes):
            now = time.monotonic()
            running = any(process.code is None for process in self._processes)
            if not running:
                drained_by = drained_by or now + 1.0
                if now > drained_by:
                    break
            if running and (self._stop_asked or self._first_failed) and self._deadline is None:
                self._deadline = now + self._grace
                self._signal(signal.SIGTERM)
            if running and self._deadline is not None and now >= self._deadline:
                self._signal(signal.SIGKILL)
                self._deadline = now + 1.0
            until = self._deadline if running else drained_by
            for key, _ in selector.select(None if until is None else max(until - now, 0.01)):
                process = key.data
                if process is None:
                    os.eventfd_read(self._wake)
                elif key.fd == process.pipe:
                    self._read(process, selector)
                else:
                    selector.unregister(process.pidfd)
                    process.reap()
                    if process.code and not self._stop_asked and self._first_failed is None:
                        self._first_failed = process

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    def _read(self, process: _Process, selector: selectors.BaseSelector) -> None:
        data = os.read(process.pipe, 1 << 16)
        *whole, process.partial = (process.partial + data).split(b"\n")
        # The last line ends at the end of the pipe, or at an excessive length.
        if process.partial and (not data or len(process.partial) > 1 << 20):
            whole, process.partial = [*whole, process.partial], b""
        if not data:
            process.open = False
            selector.unregister(process.pipe)
        for raw in whole:
            # Of a progress bar, which overwrites its line, keep the last state.
            line = raw.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
            process.lines.append(line)
            self._on_line(process.rank, line)

    def _conclude(self, before: list[Counters]) -> Result:
        codes = [process.code if process.code is not None else 128 + signal.SIGKILL for process in self._processes]
        codes += [128 + signal.SIGTERM] * (len(self._ranks) - len(codes))  # stopped before they were started
        failed = self._first_failed
        if self._timed_out:
            code = TIMED_OUT
        elif failed is not None:
            code = failed.code or 0
        else:
            code = next((code for code in codes if code), 0)
        return Result(
            code=code,
            codes=codes,
            failed_rank=failed.rank if failed else None,
            timed_out=self._timed_out,
            seconds=time.monotonic() - self._started_at,
            pinned=self._pinned,
            lines=[list(process.lines) for process in self._processes],
            traffic=[now - then for now, then in zip(self._counters(), before, strict=True)],
        )
