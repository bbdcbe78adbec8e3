"""Signal handling while a cluster is up, so that termination cleans up.

SIGTERM and SIGHUP would skip all cleanup. Instead they raise SystemExit in the main thread, and the program unwinds through
`Cluster.__exit__` or atexit; Ctrl-C raises KeyboardInterrupt as usual. Handlers installed by the program are not replaced.
The previous handlers are restored when the last cluster is down.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_clusters: set[object] = set()
_watched: list[int] = []


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def watch(cluster: object) -> None:
    _clusters.add(cluster)
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave)
                _watched.append(number)


def unwatch(cluster: object) -> None:
    _clusters.discard(cluster)
    if not _clusters and threading.current_thread() is threading.main_thread():
        while _watched:
            number = _watched.pop()
            if signal.getsignal(number) is _leave:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Defer signals until the end of the block: a second Ctrl-C must not interrupt the cleanup after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before: dict[int, Any] = {}
    for number in _SIGNALS:
        if callable(handler := signal.getsignal(number)) and not isinstance(handler, signal.Handlers):
            before[number] = handler
            signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
        for caught in arrived:
            signal.raise_signal(caught)
