"""Digits with a small CNN: torchrun --standalone --nproc-per-node 2 examples/mnist.py --data mnist.npz

The file has x_train, y_train, x_test, y_test (images as bytes). Without one, stripes are drawn, which are easier.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire


def load(path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if path is None:  # a bright stripe, whose place is the class
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (6000,), generator=generator)
        images = torch.randn(6000, 1, 28, 28, generator=generator)
        images[torch.arange(6000), 0, 2 * labels + 4] += 1.5
        return images[:5000], labels[:5000], images[5000:], labels[5000:]
    with np.load(path) as file:
        images = [torch.from_numpy(file[name]).float().unsqueeze(1) / 255 for name in ("x_train", "x_test")]
        labels = [torch.from_numpy(file[name].astype(np.int64)) for name in ("y_train", "y_test")]
    return images[0], labels[0], images[1], labels[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=None)
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = load(options.data)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    ddp = DistributedDataParallel(model)
    wire = thinwire.attach(ddp, options.codec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for chosen in order[: len(order) // (world * options.batch) * world * options.batch].view(
            -1, world, options.batch
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(images[chosen[rank]]), labels[chosen[rank]]).backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean().item()
        if rank == 0:
            stats = wire.stats()
            print(
                f"epoch {epoch + 1}: accuracy {right:.4f}, {stats['codec']}, {stats['bytes_per_step']:.0f} bytes a step"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
