"""The folder of compiled kernels on disk: one per version of the kernels, of the compiler and of the CPU.

Kernels of one file call those of others, so what is compiled depends on all of their sources: the name of the folder holds a
hash of them, and an edit anywhere leads to another folder. Stamps in it say for which codecs everything is compiled.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..log import logger
from ..version import __version__

VARIABLE = "THINWIRE_CACHE_DIR"
KEPT = 6
"""Folders of other versions that stay: clusters share home directories between machines and releases."""

CPU = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")
"""What /proc/cpuinfo says of a CPU that decides which instructions are compiled."""

OPTIONS = ("BOUNDSCHECK", "OPT", "CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "LOOP_VECTORIZE", "SLP_VECTORIZE")
"""Environment variables of Numba that change the machine code, and that its own cache does not look at."""


@dataclass(frozen=True)
class Observer:
    """Hears of kernels that are not in the cache: `miss` first, after which they may be there; `compiles`, if they are not."""

    miss: Callable[[], None]
    compiles: Callable[[str], None]


observer: Observer | None = None


def base() -> Path:
    """Where thinwire keeps what it can make again."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "thinwire"


@functools.cache
def folder() -> Path:
    """Where this process keeps compiled kernels. Where nothing can be written, a folder for temporary files takes over."""
    place = wished()
    if _writable(place) or (place / "ready").is_dir():  # filled beforehand, as part of an image
        return place
    found = _temporary() / place.name
    found.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(
            "compiled kernels cannot be kept in %s: they are kept in %s, until that is emptied. Set %s to a folder that lasts",
            place.parent,
            found,
            VARIABLE,
        )
    return found


def is_ready(what: str) -> bool:
    """Whether everything that this needs (the text of a codec, mostly) was compiled."""
    return _stamp(what).exists()


def mark_ready(what: str) -> None:
    with contextlib.suppress(OSError):  # who cannot write it finds the kernels themselves
        stamp = _stamp(what)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(what)


def _stamp(what: str) -> Path:
    return folder() / "ready" / hashlib.sha256(what.encode()).hexdigest()[:16]


@contextlib.contextmanager
def locked(name: str, wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock of this folder, which ends with the process at the latest. `wait` is called if another process has it.

    Where no lock can be had (a folder that cannot be written, a file system without locks) there is none.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(folder() / f"{name}.lock", "a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tidy() -> None:
    """Remove what killed compilers left half written, and all but the last folders of other versions."""
    with contextlib.suppress(OSError):
        with locked("index"):
            for half in folder().glob("*.tmp.*"):
                half.unlink()
        others = [path for path in folder().parent.iterdir() if path.is_dir() and path != folder()]
        for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def sources() -> list[Path]:
    """The files that kernels are compiled from: those of `cpu`, and the planner's."""
    package = Path(__file__).parents[1]
    planner = [path for path in sorted((package / "planner").glob("*.py")) if b"@kernel" in path.read_bytes()]
    return [*sorted((package / "kernels" / "cpu").glob("*.py")), *planner]


def wished() -> Path:
    """The folder's place, whether or not it can be had there."""
    above = base() / "kernels"
    if VARIABLE not in os.environ and (numba := os.environ.get("NUMBA_CACHE_DIR")):
        above = Path(numba) / "thinwire"
    versions = [f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite", "numpy")]
    cpu = _cpu()
    options = [f"{name}={os.environ.get(f'NUMBA_{name}', '')}" for name in OPTIONS]
    digest = hashlib.sha256(repr((versions, cpu, platform.python_version(), options)).encode())
    for path in sources():
        digest.update(path.name.encode() + path.read_bytes())
    words = [__version__, f"python{platform.python_version()}", versions[0], cpu[0][:30], digest.hexdigest()[:16]]
    return above / "-".join(re.sub(r"[^\w.]+", "_", word) for word in words)


def _cpu() -> list[str]:
    """The CPU's name, then what else tells its instructions."""
    found = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() in CPU:
                found[key.strip()] = value.strip()
            if not line.strip():  # of the first core only
                break
    name = found.pop("model name", "") or platform.processor() or platform.machine()
    return [name, platform.machine(), *(f"{key} {found[key]}" for key in sorted(found))]


def _writable(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
        os.utime(place)  # the last used are kept
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)


def _temporary() -> Path:
    """A folder for temporary files that no other user can have put something into: what is cached is code."""
    shared = Path(tempfile.gettempdir()) / f"thinwire-{os.getuid()}"
    with contextlib.suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return shared
    return Path(tempfile.mkdtemp(prefix="thinwire-"))
