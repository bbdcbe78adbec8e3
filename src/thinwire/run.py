"""thinwire for an unchanged script: `torchrun --nproc-per-node 4 -m thinwire.run [--codec TEXT | --plan FILE] train.py ...`.

Every DistributedDataParallel that the script builds gets its wire when it is built; without a codec or a plan that is
`auto`. `thinwire profile` uses the same way in: there the script is watched for some steps, measured, and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from typing import Any

from . import hooks
from .errors import PlanError, ThinwireError

Orders = dict[str, Any]


def obey(text: str) -> None:
    """Do from now on what the variable THINWIRE_RUN says with every DDP module."""
    try:
        orders = dict(json.loads(text))
        what = {"attach": _attach, "profile": _profile}[orders["do"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ThinwireError(f"{hooks.VARIABLE} is {text!r}, which is not understood: {error!r}") from None
    hooks.subscribe(lambda module: what(module, orders))


def _attach(module: Any, orders: Orders) -> None:
    from .frontends.attach import attach
    from .planner.plan import Plan

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
    import torch.distributed as dist

    from .frontends.profile import WATCHED, Profiling
    from .log import logger, set_up

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m thinwire.run", description=__doc__.splitlines()[0])
    parser.add_argument("--codec", help="a codec for everything, as in 'micro(density=0.01)'")
    parser.add_argument("--plan", help="a plan file, as `thinwire plan` writes it")
    parser.add_argument(
        "--quality", choices=("lossless", "high", "fast"), help="what `auto` may choose from, without the two above"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.epilog = (
        "example: torchrun --nproc-per-node 4 -m thinwire.run --codec 'micro(density=0.01)' train.py --epochs 3"
    )
    options = parser.parse_args()
    if sum(given is not None for given in (options.codec, options.plan, options.quality)) > 1:
        parser.error("give --codec, --plan or --quality, not several of them")
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}")
    if options.plan is not None:
        from .planner.plan import Plan

        try:
            Plan.load(options.plan)
        except PlanError as error:
            parser.error(str(error))
    os.environ[hooks.VARIABLE] = json.dumps(
        {"do": "attach", "codec": options.codec, "plan": options.plan, "quality": options.quality}
    )

    from torch.nn.parallel import DistributedDataParallel

    hooks.watch(DistributedDataParallel)
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
