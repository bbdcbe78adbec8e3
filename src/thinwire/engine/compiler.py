"""Compiles what codecs and planning need, once per machine: in this process, or in a child of low priority.

`python -m thinwire.engine.compiler TEXT...` is that child. It ends with its parent, whose end closes its standard input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..kernels import cache
from ..log import logger

PLANNING = "planning"
"""Stands among the texts of codecs for the kernels that search for a plan."""

NICENESS = 10
"""Of a child: beside a job that leaves no CPU idle it still gets a tenth of one."""


_shared = False
"""Whether a parent holds the lock for this process."""


def share_lock() -> None:
    """This process is one of several that compile for a parent, which holds the lock."""
    global _shared
    _shared = True


@contextlib.contextmanager
def compiling(
    begin: Callable[[], None] = lambda: None,
    compiles: Callable[[str], None] = lambda name: None,
    wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold the lock of all compilers of this machine from the first kernel on that is not in the cache.

    begin     called before the first kernel is compiled
    compiles  called with the name of each
    wait      called if another process is compiling
    """
    with contextlib.ExitStack() as held:
        owned, begun = _shared, False

        def miss() -> None:
            nonlocal owned
            if not owned:
                owned = True
                held.enter_context(cache.locked("compiler", wait))
                cache.tidy()

        def compiled(name: str) -> None:
            nonlocal begun
            if not begun:
                begun = True
                begin()
            compiles(name)

        before, cache.observer = cache.observer, cache.Observer(miss, compiled)
        try:
            yield
        finally:
            cache.observer = before


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """`compiling` while a user waits: a line in the log, and on a terminal what is being compiled."""
    with contextlib.ExitStack() as shown:
        tell: Callable[[str], None] | None = None
        count = 0

        def begin() -> None:
            nonlocal tell
            logger.info("compiling the kernels of %s, once per machine: it takes 3 to 10 seconds", what)
            if sys.stderr.isatty() and logger.isEnabledFor(logging.INFO):
                from rich.console import Console

                tell = shown.enter_context(Console(stderr=True).status("")).update

        def compiles(name: str) -> None:
            nonlocal count
            count += 1
            if tell is not None:
                tell(f"kernel {count}: {name}")

        def wait() -> None:
            logger.info("another process compiles kernels on this machine: waiting for it")

        with compiling(begin, compiles, wait):
            yield


def missing(texts: Sequence[str]) -> list[str]:
    """Those that are not known to be compiled."""
    return [text for text in texts if not cache.is_ready(text)]


def rehearse(text: str) -> None:
    """Call whatever one of them calls, so that it is compiled."""
    if text == PLANNING:
        from ..planner.rehearsal import rehearse as plan

        plan()
        return
    from .rehearsal import rehearse as exchange
    from .strategy import Strategy

    for assignment in Strategy.of(text).assignments:
        exchange(assignment.codec, assignment.chain)


def prepare(text: str, work: Callable[[str], None] = rehearse) -> int:
    """Do some work unless it was done for this machine, and leave a stamp. The number of kernels that were compiled."""
    names: list[str] = []
    if not cache.is_ready(text):
        with compiling(compiles=names.append):
            work(text)
        cache.mark_ready(text)
    return len(names)


class CompilerProcess:
    """A child that compiles for these texts and ends."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *texts],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
        )

    @property
    def problem(self) -> str | None:
        """Why it has failed; None while it works, and if it has done its work."""
        if not self._process.poll():
            return None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")

    def close(self) -> None:
        """End it, wherever it is: what is in the cache is whole."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._errors.close()


def step_back() -> None:
    """Leave the CPU to others, and use whichever of this machine is idle: a rank may be bound to one."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def end_with_parent() -> None:
    """End as soon as standard input is closed; the kernel closes it whichever way the parent ends."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="thinwire-parent", daemon=True).start()


def main() -> None:
    end_with_parent()
    step_back()
    import torch

    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        prepare(text)


if __name__ == "__main__":
    main()
