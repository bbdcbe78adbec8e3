"""thinwire in the training loops of others, one file a framework; each needs its package and nothing else.

The state of a wire lies in a folder of each checkpoint, one file a rank, and is loaded with it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ..engine.wire import Wire
from ..log import logger
from ..schemes.world import device_of

FOLDER = "thinwire"


def load_if_there(wire: Wire, folder: Path) -> None:
    """Go on from a checkpoint; one that was made without thinwire has no such folder, which is said. A collective."""
    found = torch.tensor([float(folder.is_dir())], device=device_of(None))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # a rank that does not see what others see must not stay behind
    if found.item():
        wire.load(folder)
    elif dist.get_rank() == 0:
        logger.warning("the checkpoint has no state of thinwire (%s): residuals begin at zero", folder)
