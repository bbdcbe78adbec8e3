"""Integrations with training frameworks, one module per framework.

The state of a wire is saved in a folder of each checkpoint, one file per rank, and restored with it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.world import device_of
from ..engine.wire import Wire
from ..experimental.stream import StreamWire
from ..log import logger

FOLDER = "thinwire"


def load_if_there(wire: Wire | StreamWire, folder: Path) -> None:
    """Restore a wire from a checkpoint; warns if the checkpoint was made without thinwire. A collective."""
    found = torch.tensor([float(folder.is_dir())], device=device_of(None))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)  # all ranks load if any rank sees the folder
    if found.item():
        wire.load(folder)
    elif dist.get_rank() == 0:
        logger.warning("the checkpoint has no thinwire state (%s): residuals begin at zero", folder)
