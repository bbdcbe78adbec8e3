"""Pictures with a small ResNet, in bfloat16: torchrun --standalone --nproc-per-node 2 examples/cifar.py --data cifar10.npz

The file has x_train, y_train, x_test, y_test (32 x 32 x 3 bytes). Without one, colours are drawn that are easier. Norms and
biases travel dense, densities begin high: what a sparse exchange of a network with batch norm needs.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def load(path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if path is None:  # noise with a tint
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (3000,), generator=generator)
        tints = torch.randn(10, 3, 1, 1, generator=generator)
        images = torch.randn(3000, 3, 32, 32, generator=generator) + tints[labels]
        return images[:2500], labels[:2500], images[2500:], labels[2500:]
    with np.load(path) as file:
        images = [torch.from_numpy(file[name]).permute(0, 3, 1, 2).float() / 128 - 1 for name in ("x_train", "x_test")]
        labels = [torch.from_numpy(file[name].astype(np.int64)).flatten() for name in ("y_train", "y_test")]
    return images[0], labels[0], images[1], labels[1]


class Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        self.short = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.short(x) + self.norms[1](self.second(y)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None)
    parser.add_argument("--codec", default="micro(density=Warmup(0.01, steps=200))")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="pictures of each rank in a step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load(options.data)
    torch.manual_seed(0)
    blocks = [Block(before, width, 2) for before, width in ((3, 16), (16, 32), (32, 64))]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    wire = thinwire.attach(ddp, options.codec, exclude=["*norms*", "*bias"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    wire.guard(optimizer)
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for chosen in order[: len(order) // (world * options.batch) * world * options.batch].view(
            -1, world, options.batch
        ):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(ddp(images[chosen[rank]]), labels[chosen[rank]])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean().item()
        model.train()
        if rank == 0:
            stats = wire.stats()
            print(f"epoch {epoch + 1}: accuracy {right:.4f}, {stats['bytes_per_step']:.0f} bytes a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
