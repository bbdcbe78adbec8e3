"""Lifecycle of a wire: which way its gradients go, and when that may change."""

import enum
import threading

from ..errors import ExchangeError, WireClosed


class Phase(enum.Enum):
    """Which way the gradients of a step go."""

    NATIVE = "native"
    """DDP alone: no communication hook is registered."""
    DENSE = "dense"
    """Plain all-reduces, because there is no layout yet: DDP's buckets are not final."""
    HOLDING = "holding"
    """A resumed job sees its final buckets for the first time: all of them are waited for, then exchanged."""
    COMPRESSED = "compressed"
    """By the layout, in the exchange thread."""
    DIRECT = "direct"
    """There is a layout, and nothing to it but all-reduces: they are issued right from the hook."""
    CONTROL = "control"
    """One dense step of a job that compresses, for comparison: plain all-reduces, and whatever the layout remembers stays."""
    CLOSED = "closed"


_LAYOUT = {Phase.COMPRESSED, Phase.DIRECT, Phase.CONTROL, Phase.CLOSED}
"""Where there is a layout, there will be one."""

_NEXT = {
    Phase.NATIVE: {Phase.DENSE, Phase.HOLDING, *_LAYOUT},
    Phase.DENSE: {Phase.HOLDING, *_LAYOUT},
    Phase.HOLDING: {Phase.DENSE, *_LAYOUT},  # a change, or a state, may want less
    Phase.COMPRESSED: _LAYOUT,
    Phase.DIRECT: _LAYOUT,
    Phase.CONTROL: _LAYOUT,
    Phase.CLOSED: set[Phase](),
}


class Lifecycle:
    """The phase of one wire, and what closed it."""

    def __init__(self) -> None:
        self.phase = Phase.NATIVE
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def enter(self, phase: Phase) -> None:
        """The next step goes this way."""
        with self._lock:
            if phase is self.phase:
                return
            if phase not in _NEXT[self.phase]:
                raise ExchangeError(f"a wire that is {self.phase.value} cannot become {phase.value}")
            self.phase = phase

    def close(self, error: BaseException | None = None) -> None:
        """For good; the first error counts. May be called from any thread, and twice."""
        with self._lock:
            if self.error is None:
                self.phase, self.error = Phase.CLOSED, error if error is not None else WireClosed("it was closed")
