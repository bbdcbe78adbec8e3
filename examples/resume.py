"""A job that may be killed at any time, and goes on from its last checkpoint with the same bits:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/resume.py --folder run

Kill a rank (kill -9) while it trains: torchrun starts all of them again, and they resume. Start it once more with another
--nproc-per-node: the ranks go on with the mean of what the old ones had not sent.

The variable is for torchrun: without it restarted ranks find the addresses of the dead ones in its store.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("run"), help="where checkpoints are")
    parser.add_argument("--codec", default="micro(density=0.05)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    return parser.parse_args()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a data loader would give: the same for the same step and rank, whatever happened before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(32, 64, generator=generator)
    return inputs, (inputs[:, :10] * 2).argmax(1)


def train(given: argparse.Namespace) -> str:
    """Train from the last checkpoint on; a digest of the model."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    wire = thinwire.attach(ddp, given.codec)
    torch.manual_seed(rank)  # for dropout

    latest, step = given.folder / "latest", 0
    if latest.exists():
        here = given.folder / latest.read_text()
        step = load(here, ddp, optimizer, wire)
        if rank == 0:
            print(f"resumed at step {step}", flush=True)

    while step < given.steps:
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % given.every == 0 or step == given.steps:
            here = given.folder / f"step-{step:06d}"
            save(here, step, ddp, optimizer, wire)
            dist.barrier()  # everybody has written: only now does it count
            if rank == 0:
                draft = given.folder / ".latest"
                draft.write_text(here.name)
                os.replace(draft, latest)

    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(bits).hexdigest()


def save(here: Path, step: int, ddp: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Wire) -> None:
    wire.save(here)  # a file of every rank: what it has not sent yet
    torch.save(torch.get_rng_state(), here / f"random-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(
            {"step": step, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, here / "model.pt"
        )


def load(here: Path, ddp: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Wire) -> int:
    common = torch.load(here / "model.pt", weights_only=True)
    ddp.module.load_state_dict(common["model"])
    optimizer.load_state_dict(common["optimizer"])
    wire.load(here)  # also if there are more or fewer ranks now
    random = here / f"random-{dist.get_rank()}.pt"
    if random.exists():  # not for a rank that there was not before
        torch.set_rng_state(torch.load(random, weights_only=True))
    return int(common["step"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digest = train(options())
    if dist.get_rank() == 0:
        print(f"model {digest}", flush=True)
    dist.destroy_process_group()
