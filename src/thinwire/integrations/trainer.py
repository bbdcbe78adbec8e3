"""thinwire for the Trainer of Hugging Face Transformers:

    trainer = thinwire.integrations.trainer.ThinwireTrainer(model, args, train_dataset=data, codec="micro(density=0.01)")

    class MyTrainer(thinwire.integrations.trainer.Thinwire, Seq2SeqTrainer): ...      # any other Trainer likewise

Residuals are saved in each `checkpoint-N`, and loaded by `train(resume_from_checkpoint=...)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..codecs import Codec
from ..ddp.attach import AUTO, attach
from ..engine.wire import Wire
from ..experimental.stream import StreamWire
from ..log import logger, set_up
from ..planner.plan import Plan
from . import FOLDER, load_if_there


class Thinwire:
    """A mixin that comes before a Trainer in the list of base classes.

    codec         as for `thinwire.attach`
    wire_options  passed to `thinwire.attach`, as in {"min_elements": 0}

    `wire` is set from `on_train_begin` on, if there is more than one process.
    """

    wire: Wire | StreamWire | None = None
    resume_from: Path | None = None

    def __init__(
        self,
        *args: Any,
        codec: Codec | str | Plan = AUTO,
        wire_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        follower = _Follower(self, codec, wire_options or {})
        self.add_callback(follower)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # type: ignore[attr-defined]
        path = resume_from_checkpoint
        self.resume_from = Path(path) / FOLDER if path and path is not True else None
        return super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]


class _Follower(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self, trainer: Any, codec: Codec | str | Plan, options: dict[str, Any]) -> None:
        self._trainer, self._codec, self._options = trainer, codec, options
        self._ddp: DistributedDataParallel | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self._trainer
        module = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)
        if not isinstance(module, DistributedDataParallel):
            set_up()
            logger.warning("a single process, or a model without DDP: thinwire has nothing to exchange")
            return
        if module is not self._ddp:  # `train` may be called again with the same DDP
            trainer.wire = attach(module, self._codec, **{"scaler": trainer.accelerator.scaler, **self._options})
            self._ddp = module
        if trainer.resume_from is not None:
            load_if_there(trainer.wire, trainer.resume_from)

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._trainer.wire is not None:
            self._trainer.wire.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER)


class ThinwireTrainer(Thinwire, Trainer):  # type: ignore[misc, unused-ignore]
    """`Trainer` with thinwire."""
