"""Finds and removes what a cluster leaves behind when its parent process is killed.

While a cluster is up, a file `<id>.<pid>.<start time>` records its owner. It is written before the first namespace is created,
and its name alone suffices, so a kill at any point leaves nothing unknown. Processes of a cluster and their children have
`THINWIRE_LAB=<id>/<job>` in their environment.
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
    """Directories of the files; the first is written, all are searched (sudo and su drop XDG_RUNTIME_DIR)."""
    found = [Path(tempfile.gettempdir()) / f"thinwire-lab-{os.geteuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        found.insert(0, Path(runtime) / "thinwire-lab")
    return found


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone. Identifies a process together with its pid."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(rest[18])


@dataclass(frozen=True)
class Record:
    """A cluster: its identity, the process that owns it, and the description that the process wrote."""

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
                raise LabError(f"{directory} belongs to another user: set XDG_RUNTIME_DIR to a directory that you own")
            path = directory / f"{identity}.{pid}.{start}"
            try:
                path.write_text(json.dumps(about))
                return cls(path, identity, pid, start, about)
            except FileNotFoundError:  # another process has just removed the directory with its last cluster
                continue
        raise LabError(f"cannot write to {directory}")

    @classmethod
    def read(cls, path: Path) -> Record | None:
        parts = path.name.split(".")
        if len(parts) != 3 or not all(part.isdecimal() and len(part) < 20 for part in parts[1:]):
            return None
        about = None
        with contextlib.suppress(OSError, ValueError, RecursionError):
            about = json.loads(path.read_text())
        return cls(path, parts[0], int(parts[1]), int(parts[2]), about if isinstance(about, dict) else {})

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.start

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # fails while other clusters have files in it


def records() -> list[Record]:
    found = []
    for directory in directories():
        if directory.is_dir() and directory.lstat().st_uid == os.geteuid():
            found += [Record.read(path) for path in sorted(directory.iterdir())]
    return [record for record in found if record is not None]


def processes(identity: str) -> set[int]:
    """All processes that a cluster started, and their children, found by the mark in their environment."""
    mark = f"{MARK}={identity}/".encode()
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:
                if any(item.startswith(mark) for item in file.read().split(b"\0")):
                    found.add(int(entry.name))
    return found - {os.getpid()}


def end_processes(identity: str, namespaces: list[str], patience: float = 5.0) -> None:
    """Kill a cluster's processes and wait until they are gone.

    Includes processes that cleared their environment, if they are in one of the namespaces. Repeats until none is left: a
    process that forks meanwhile leaves a child that was not in the list.
    """
    deadline = time.monotonic() + patience
    while True:
        left = processes(identity)
        for name in namespaces:
            with contextlib.suppress(LabError):  # not root: no such names exist
                left |= {int(pid) for pid in command(["ip", "netns", "pids", name]).split()}
        left = {pid for pid in left - {os.getpid()} if start_time(pid) is not None}
        if not left:
            return
        if time.monotonic() > deadline:
            raise LabError(f"processes {sorted(left)} of the cluster {identity} survive SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_dead() -> list[Record]:
    """Remove the namespaces, interfaces, processes and files of every cluster whose parent is dead."""
    dead = [record for record in records() if not record.alive]
    for record in dead:
        try:
            names = [name for name in list_namespaces() if name.startswith(record.identity + "-")]
        except LabError:  # without `ip` no namespace was created
            names = []
        end_processes(record.identity, names)
        if names:
            remove_namespaces(names)
        record.remove()
    return dead
