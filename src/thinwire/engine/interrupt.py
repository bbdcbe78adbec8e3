"""Ctrl-C while backward waits for an exchange.

Backward waits for our futures in C++, where Python delivers no signal. A wake-up descriptor is written to all the same:
a watcher thread reads it and makes the waits fail, so that the main thread comes back and sees its KeyboardInterrupt.
"""

import atexit
import contextlib
import os
import signal
import socket
import threading
import weakref
from typing import Protocol


class Interruptible(Protocol):
    @property
    def waiting(self) -> bool: ...

    def interrupt(self) -> None: ...


_watched: weakref.WeakSet[Interruptible] = weakref.WeakSet()
_lock = threading.Lock()
_serving = threading.Lock()
_installed = False

PATIENCE = 5.0
"""Seconds for what Ctrl-C interrupted to close, at the end of the process."""


def watch(target: Interruptible) -> None:
    """Interrupt `target` on Ctrl-C, as long as it lives and SIGINT raises KeyboardInterrupt."""
    global _installed
    with _lock:
        _watched.add(target)
        if _installed or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Whoever had the descriptor before (an event loop) keeps getting what it got.
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_serve, args=(reader, writer, previous), name="thinwire-signals", daemon=True).start()
        atexit.register(_end)  # now: before what was registered with the modules, which waits for groups that close
        _installed = True


def _end() -> None:
    """Before the interpreter ends: a thread that frees tensors or groups while it does so would abort the process."""
    if _serving.acquire(timeout=PATIENCE):
        _serving.release()


def _serve(reader: socket.socket, writer: socket.socket, previous: int) -> None:
    while numbers := reader.recv(64):
        if previous >= 0:
            with contextlib.suppress(OSError):
                os.write(previous, numbers)
        # A handler of the user's own may want the step to go on; the default one wants to get out.
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Chosen first: to end one takes time, in which the main thread may have begun with another.
            with _serving:
                for target in [target for target in list(_watched) if target.waiting]:
                    target.interrupt()
