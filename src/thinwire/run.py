"""thinwire for an unmodified script: `torchrun --nproc-per-node 4 -m thinwire.run [--codec TEXT | --plan FILE] train.py ...`.

Attaches to every DistributedDataParallel when the script constructs it, with `auto` unless a codec or plan is given.
`thinwire profile` uses the same hook to observe a few steps, measure, and stop the script.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys

from torch.nn.parallel import DistributedDataParallel

from .autoattach.orders import VARIABLE, follow
from .errors import PlanError
from .planner.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m thinwire.run", description=__doc__.splitlines()[0])
    parser.add_argument("--codec", help="codec for all tensors, as in 'micro(density=0.01)'")
    parser.add_argument("--plan", help="plan file written by `thinwire plan`")
    parser.add_argument(
        "--quality",
        choices=("lossless", "high", "fast"),
        help="limits the codecs that `auto` considers; not with --codec or --plan",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parser.epilog = (
        "example: torchrun --nproc-per-node 4 -m thinwire.run --codec 'micro(density=0.01)' train.py --epochs 3"
    )
    options = parser.parse_args()
    if sum(given is not None for given in (options.codec, options.plan, options.quality)) > 1:
        parser.error("give only one of --codec, --plan and --quality")
    if not options.module and not os.path.isfile(options.script):
        parser.error(f"there is no script {options.script!r}")
    if options.plan is not None:
        try:
            Plan.load(options.plan)
        except PlanError as error:
            parser.error(str(error))
    os.environ[VARIABLE] = json.dumps(
        {"do": "attach", "codec": options.codec, "plan": options.plan, "quality": options.quality}
    )
    follow(DistributedDataParallel)
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.script))
        runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
