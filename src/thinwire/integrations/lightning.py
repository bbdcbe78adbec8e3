"""thinwire for Lightning:

    trainer = lightning.Trainer(strategy=thinwire.integrations.lightning.ThinwireStrategy("micro(density=0.01)"), ...)

Residuals are saved next to each checkpoint, in `last.ckpt.thinwire` for `last.ckpt`, and loaded and removed with it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from ..codecs import Codec
from ..ddp.attach import AUTO, attach
from ..engine.wire import Wire
from ..experimental.stream import StreamWire
from ..planner.plan import Plan
from . import FOLDER, load_if_there


class ThinwireStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """`DDPStrategy` that exchanges gradients with thinwire.

    codec         as for `thinwire.attach`
    wire_options  passed to `thinwire.attach`, as in {"min_elements": 0}
    options       passed to `DDPStrategy`, and from there to DDP

    `wire` is set from `on_fit_start` on.
    """

    def __init__(
        self, codec: Codec | str | Plan = AUTO, *, wire_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.wire: Wire | StreamWire | None = None
        self._codec, self._wire_options = codec, wire_options or {}
        self._resume_from: Path | None = None

    def configure_ddp(self) -> None:
        super().configure_ddp()
        scaler = getattr(self.precision_plugin, "scaler", None)
        assert self.model is not None
        self.wire = attach(self.model, self._codec, **{"scaler": scaler, **self._wire_options})
        if self._resume_from is not None:  # the checkpoint was loaded before DDP was built
            load_if_there(self.wire, self._resume_from)
            self._resume_from = None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        # Only needed to resume: a weights-only checkpoint has no optimizer states either.
        if self.wire is not None and "optimizer_states" in checkpoint:
            self.wire.save(_state_folder(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        self._resume_from = _state_folder(os.path.realpath(checkpoint_path))  # "last.ckpt" may be a link
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return loaded

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_state_folder(filepath), ignore_errors=True)


def _state_folder(path: Any) -> Path:
    return Path(f"{os.fspath(path)}.{FOLDER}")
