"""thinwire for Accelerate:

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    wire = thinwire.integrations.accelerate.attach(accelerator, model)  # or attach(accelerator, model, "micro(density=0.01)")

`accelerator.save_state` and `load_state` then include the residuals. Attach before `load_state`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from ..codecs import Codec
from ..ddp.attach import AUTO
from ..ddp.attach import attach as attach_to_ddp
from ..engine.wire import Wire
from ..experimental.stream import StreamWire
from ..planner.plan import Plan
from . import FOLDER, load_if_there


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    codec: Codec | str | Plan = AUTO,
    *,
    folder: str = FOLDER,
    **options: Any,
) -> Wire | StreamWire:
    """Attach to a model returned by `accelerator.prepare`. A collective.

    folder   name in each checkpoint; each model of an accelerator needs another
    options  passed to `thinwire.attach`
    """
    wire = attach_to_ddp(model, codec, **{"scaler": accelerator.scaler, **options})

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        wire.save(Path(output_dir) / folder)

    def load(models: list[nn.Module], input_dir: str) -> None:
        load_if_there(wire, Path(input_dir) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return wire
