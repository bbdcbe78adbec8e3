"""Orders from the environment for every DDP module that a script builds: attach a wire, or profile the first one."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from ..auto.profiling import WATCHED, Profiling
from ..ddp.attach import attach
from ..errors import ThinwireError
from ..log import logger, set_up
from ..planner.plan import Plan
from . import hooks

VARIABLE = "THINWIRE_RUN"
"""The environment variable with the orders, as JSON: `{"do": "profile", "file": ...}`, `{"do": "attach", ...}`."""

Orders = dict[str, Any]


def follow(kind: type) -> None:
    """From now on do what the variable THINWIRE_RUN says with every module of this kind (DistributedDataParallel)."""
    text = os.environ[VARIABLE]
    try:
        orders = dict(json.loads(text))
        what = {"attach": _attach, "profile": _profile}[orders["do"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ThinwireError(f"{VARIABLE} is {text!r}, which is not understood: {error!r}") from None
    if hooks.watch(kind):
        hooks.subscribe(lambda module: what(module, orders))


def _attach(module: Any, orders: Orders) -> None:
    try:
        if orders.get("plan"):
            attach(module, Plan.load(orders["plan"]))
        else:
            attach(module, orders.get("codec") or "auto", quality=orders.get("quality") or "high")
    except ThinwireError as error:
        if os.environ.get("THINWIRE_DEBUG"):
            raise
        sys.exit(f"thinwire.run: error: {error}")  # the script knows nothing of thinwire: its lines would not help


def _profile(module: Any, orders: Orders) -> None:
    """Profile the first module that is trained, and end the script."""
    set_up()

    def after_step() -> None:
        if not profiling.ready:
            return
        profile = profiling.measure(budget=float(orders.get("budget", 15.0)), rate=str(orders.get("rate", "")))
        profiling.close()
        if dist.get_rank() == 0:
            profile.save(orders["file"])
            logger.info("profile written to %s; the script ends here", orders["file"])
        raise SystemExit(0)

    profiling = Profiling(module, after_step)
    if dist.get_rank() == 0:
        logger.info("watching %d steps of %s", WATCHED, type(module.module).__name__)
