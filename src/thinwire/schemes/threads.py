"""How the threads of collectives share a core with the computation."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

from ..log import logger


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads that are made in here wait for the others to end their turn instead of interrupting them.

    gloo wakes its threads for nearly every packet, and each time a computation loses its place and its caches; patient ones
    take what has come in by their next turn, some milliseconds later, at once. On an idle core they run as soon as ever.
    Threads inherit this from the one that makes them, which gets its own back. THINWIRE_PATIENT=0 switches it off.
    """
    wanted = hasattr(os, "SCHED_BATCH") and os.environ.get("THINWIRE_PATIENT", "1") != "0"  # Linux only
    changed = False
    try:
        if wanted and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    except OSError as error:
        _tell_of_refusal(str(error))
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def give_way() -> None:
    """Let patient threads that have something to do begin with it now."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


@functools.cache
def _tell_of_refusal(error: str) -> None:
    """Once: nothing is lost but some speed."""
    logger.info("threads of collectives will interrupt the computation: SCHED_BATCH is not allowed here (%s)", error)
