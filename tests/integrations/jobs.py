"""One small job in each framework, for ranks of torchrun: `-m tests.integrations.jobs FRAMEWORK FOLDER [--resume]`.

Every rank writes the digest of its model, and what its wire says, to FOLDER/result-RANK.json. All get the same batches, in the
same order, as the hand-written loop `plain`; a checkpoint is made after half of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import thinwire
from tests.models import batch, digest, mlp

STEPS, HALF = 50, 25
CODEC = "micro(density=0.05)"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain(folder: Path, resume: bool) -> tuple[nn.Module, Any]:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(mlp())
    wire = thinwire.attach(ddp, CODEC)
    optimizer = _sgd(ddp)
    for step in range(STEPS):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()
    return ddp.module, wire


def accelerate(folder: Path, resume: bool) -> tuple[nn.Module, Any]:
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = mlp()
    model, optimizer = accelerator.prepare(model, _sgd(model))
    wire = attach(accelerator, model, CODEC)
    checkpoint = folder / "checkpoint"
    if resume:
        accelerator.load_state(str(checkpoint))
    for step in range(HALF if resume else 0, STEPS):
        if step == HALF and not resume:
            accelerator.save_state(str(checkpoint))
        inputs, targets = batch(step, accelerator.process_index)
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
    return accelerator.unwrap_model(model), wire


def lightning(folder: Path, resume: bool) -> tuple[nn.Module, Any]:
    import lightning as framework
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireStrategy

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def training_step(self, index: Any, number: int) -> torch.Tensor:
            inputs, targets = batch(self.trainer.global_step, self.global_rank)
            return cross_entropy(self.model(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return _sgd(self.model)

    strategy = ThinwireStrategy(CODEC, process_group_backend="gloo")
    trainer = framework.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=STEPS // HALF,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1)],
    )
    module = Module()
    loader = DataLoader(range(2 * HALF))  # type: ignore[arg-type, var-annotated]
    trainer.fit(module, loader, ckpt_path=str(folder / f"step={HALF}.ckpt") if resume else None)
    return module.model, strategy.wire


class _Samples(Dataset[dict[str, torch.Tensor]]):
    """The batches of all steps and ranks one after the other, as Accelerate deals them out."""

    def __init__(self) -> None:
        batches = [batch(step, rank) for step in range(STEPS) for rank in range(2)]
        self.inputs, self.targets = (torch.cat(parts) for parts in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(self.model(inputs), labels)}


def trainer(folder: Path, resume: bool) -> tuple[nn.Module, Any]:
    from transformers import TrainingArguments

    from thinwire.integrations.trainer import ThinwireTrainer

    class InOrder(ThinwireTrainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=16))

    model = _WithLoss()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=16,
        max_steps=STEPS,
        save_steps=HALF,
        max_grad_norm=0.0,
        report_to=[],
        disable_tqdm=True,
    )
    optimizer = _sgd(model)
    still = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trains = InOrder(model, arguments, train_dataset=_Samples(), optimizers=(optimizer, still), codec=CODEC)
    trains.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}") if resume else None)
    return model.model, trains.wire


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("plain", "accelerate", "lightning", "trainer"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, wire = globals()[given.framework](given.folder, given.resume)
    stats = wire.stats()
    result = {"digest": digest(model), "codec": stats["codec"], "bytes": stats["bytes_per_step"], "steps": wire.steps}
    (given.folder / f"result-{os.environ['RANK']}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
