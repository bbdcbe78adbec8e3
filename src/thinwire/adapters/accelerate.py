"""thinwire for Accelerate:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    wire = thinwire.adapters.accelerate.attach(accelerator, model)       # or attach(accelerator, model, "micro(density=0.01)")

`accelerator.save_state` and `load_state` then save and load what was not sent yet, too. Attach before `load_state`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..codecs import Codec
from ..engine.wire import Wire
from ..frontends.attach import AUTO
from ..frontends.attach import attach as attach_to_ddp
from ..planner.plan import Plan
from . import FOLDER, load_if_there


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    codec: Codec | str | Plan = AUTO,
    *,
    folder: str = FOLDER,
    **options: Any,
) -> Wire:
    """Exchange the gradients of a model that `accelerator.prepare` returned. A collective.

    folder   in each checkpoint; two models of one accelerator need two
    options  of `thinwire.attach`
    """
    wire = attach_to_ddp(model, codec, **{"scaler": accelerator.scaler, **options})

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        wire.save(Path(output_dir) / folder)

    def load(models: list[nn.Module], input_dir: str) -> None:
        load_if_there(wire, Path(input_dir) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return wire
