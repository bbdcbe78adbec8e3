"""Scheduling priority of communication threads that share a core with the computation."""

import contextlib
import functools
import os
from collections.abc import Iterator

from ..log import logger


@contextlib.contextmanager
def patient_threads() -> Iterator[None]:
    """Threads created in this context run as SCHED_BATCH: they do not preempt the computation.

    gloo wakes its threads for nearly every packet, and each wake-up interrupts the computation and evicts its caches. With
    SCHED_BATCH a thread handles all packets of some milliseconds in its next time slice; on an idle core it runs at once.
    Threads inherit the policy of their creator, which gets its own back afterwards. THINWIRE_PATIENT=0 disables it.
    """
    wanted = hasattr(os, "SCHED_BATCH") and os.environ.get("THINWIRE_PATIENT", "1") != "0"  # Linux only
    changed = False
    try:
        if wanted and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    except OSError as error:
        _log_refusal(str(error))
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def give_way() -> None:
    """Yield the core, so that a waiting communication thread can run now."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


@functools.cache
def _log_refusal(error: str) -> None:
    """Once per reason: only speed is affected."""
    logger.info("communication threads will preempt the computation: SCHED_BATCH is not permitted here (%s)", error)
