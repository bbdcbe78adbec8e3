"""What a cluster leaves behind when its parent is killed, and how it is found again.

While a cluster is up a file `<id>.<pid>.<start time>` says whose it is. It is written before the first namespace is
made, and its name alone holds what matters, so that being killed half-way through leaves nothing unknown. Processes of
a cluster carry `THINWIRE_LAB=<id>/<job>` in their environment, and so do their children.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .netns import LabError, command, list_namespaces, remove_namespaces

MARK = "THINWIRE_LAB"


def directories() -> list[Path]:
    """Where the files are; the first one is written, all are searched (sudo and su drop XDG_RUNTIME_DIR)."""
    found = [Path(tempfile.gettempdir()) / f"thinwire-lab-{os.geteuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        found.insert(0, Path(runtime) / "thinwire-lab")
    return found


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone. With the pid it is never used twice."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(rest[18])


@dataclass(frozen=True)
class Record:
    """One cluster: its identity, the process it belongs to, and what that process wrote about it."""

    path: Path
    identity: str
    pid: int
    start: int
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def write(cls, identity: str, about: dict[str, Any]) -> Record:
        pid = os.getpid()
        start = start_time(pid)
        assert start is not None
        for _ in range(10):
            directory = directories()[0]
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            status = directory.lstat()
            if status.st_uid != os.geteuid() or not directory.is_dir() or directory.is_symlink():
                raise LabError(f"{directory} belongs to somebody else: set XDG_RUNTIME_DIR to a directory of your own")
            path = directory / f"{identity}.{pid}.{start}"
            try:
                path.write_text(json.dumps(about))
                return cls(path, identity, pid, start, about)
            except FileNotFoundError:  # the last cluster of another process has just taken the directory away
                continue
        raise LabError(f"cannot write to {directory}")

    @classmethod
    def read(cls, path: Path) -> Record | None:
        parts = path.name.split(".")
        if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
            return None
        about = {}
        with contextlib.suppress(OSError, ValueError):
            about = json.loads(path.read_text())
        return cls(path, parts[0], int(parts[1]), int(parts[2]), about)

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # stays while other clusters have files in it


def records() -> list[Record]:
    found = []
    for directory in directories():
        if directory.is_dir() and directory.lstat().st_uid == os.geteuid():
            found += [Record.read(path) for path in sorted(directory.iterdir())]
    return [record for record in found if record is not None]


def processes(identity: str) -> set[int]:
    """Every process that a cluster started, and their children, by the mark in their environment."""
    mark = f"{MARK}={identity}/".encode()
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:
                if any(item.startswith(mark) for item in file.read().split(b"\0")):
                    found.add(int(entry.name))
    return found - {os.getpid()}


def end_processes(identity: str, namespaces: list[str], patience: float = 5.0) -> None:
    """Kills what is left of a cluster's processes and waits until they are gone.

    Also those that wiped their environment, if they are in one of the namespaces. Killing once is not enough: a
    process that forks meanwhile leaves a child that was not in the list.
    """
    deadline = time.monotonic() + patience
    while True:
        left = processes(identity)
        for name in namespaces:
            with contextlib.suppress(LabError):  # not root: there are no such names
                left |= {int(pid) for pid in command(["ip", "netns", "pids", name]).split()}
        left = {pid for pid in left - {os.getpid()} if start_time(pid) is not None}
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(left)} of the cluster {identity} do not end, even killed")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_dead() -> list[Record]:
    """Removes the namespaces, interfaces, processes and files of every cluster whose parent is dead."""
    dead = [record for record in records() if not record.alive]
    for record in dead:
        try:
            names = [name for name in list_namespaces() if name.startswith(record.identity + "-")]
        except LabError:  # without `ip` no namespace was made
            names = []
        end_processes(record.identity, names)
        if names:
            remove_namespaces(names)
        record.remove()
    return dead
