"""Accuracy of MiCRO's threshold controller on a real model: `python -m thinwire.lab.controller --data mnist.npz`.

A small CNN is trained on MNIST by four ranks in one process. K is the number of elements selected by all ranks in a step, k
the target, M the most that a rank selected, n the number of ranks. Without `--data`, images are generated patterns.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from ..codecs import parse
from ..codecs.micro_state import MicroState
from ..comm.world import LocalWorld
from ..engine.exchange import Exchange
from .results import write

CODECS = (
    "micro",
    "micro(balance=False)",
    "micro(controller='fixed', balance=False)",
    "micro(controller='paper_code', balance=False)",
)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip


def digits(path: Path | None) -> tuple[Tensor, Tensor]:
    """28x28 images and their classes, from an .npz with `x_train` and `y_train`, or generated."""
    if path is not None:
        data = np.load(path)
        images = (torch.from_numpy(data["x_train"]).float()[:, None] / 255 - 0.1307) / 0.3081
        return images, torch.from_numpy(data["y_train"]).long()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (8192,), generator=generator)
    patterns = torch.randn(10, 1, 28, 28, generator=generator)
    return patterns[labels] + torch.randn(8192, 1, 28, 28, generator=generator), labels


def follow(text: str, images: Tensor, labels: Tensor, batch_size: int, ranks: int, steps: int) -> dict[str, Any]:
    """Train for `steps` steps; one row with the selection of the codec."""
    net = model()
    parameters = dict(net.named_parameters())
    exchange = Exchange(parameters, parse(text), LocalWorld(ranks), min_elements=200)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    drivers = [run.driver for run in exchange.executor.rank_states[0].groups if run.driver is not None]
    runs = [driver for driver in drivers if isinstance(driver.state, MicroState)]
    target = sum(int(0.01 * sum(parameter.elements for parameter in run.info.parameters)) for run in runs)
    seen: list[tuple[float, float, bool, float]] = []
    for _ in track(range(steps), description=text, transient=True):
        gradients = []
        for _ in range(ranks):
            places = torch.randint(len(images), (batch_size,), generator=generator)
            net.zero_grad()
            loss = nn.functional.cross_entropy(net(images[places]), labels[places])
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append({key: value.grad.clone() for key, value in parameters.items() if value.grad is not None})
        exchange.reduce_(gradients)
        for key, value in parameters.items():
            value.grad = gradients[0][key]
        optimizer.step()
        states = [run.state for run in runs if isinstance(run.state, MicroState)]
        overflow = any(state.count < state.wanted for state in states)
        sent = sum(state.count for state in states) / target
        seen.append((sent, max(state.imbalance for state in states), overflow, float(loss.detach())))
    exchange.close()
    ratio, imbalance, overflows, losses = (np.array(column) for column in zip(*seen, strict=True))
    late = slice(min(100, steps // 2), None)
    return {
        "codec": text,
        "ranks": ranks,
        "steps": steps,
        "ratio_10_100": float(ratio[10:100].mean()),
        "ratio_100_500": float(ratio[late].mean()),
        "in_range": float(((ratio[late] >= 0.67) & (ratio[late] <= 1.5)).mean()),
        "overflow": float(overflows[min(50, steps // 2) :].mean()),
        "imbalance": float(np.median(imbalance[late])),
        "loss": float(losses[-50:].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file with x_train and y_train")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--json", type=Path, dest="json_file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = digits(options.data)
    rows = [follow(text, *data, options.batch_size, options.ranks, options.steps) for text in options.codecs]
    table = Table("codec", "K/k 10-100", "K/k from 100 on", "in 0.67-1.5", "overflow from 50 on", "n M/K", "last loss")
    for row in rows:
        numbers = ("ratio_10_100", "ratio_100_500", "in_range", "overflow", "imbalance", "loss")
        table.add_row(str(row["codec"]), *(f"{row[key]:.3f}" for key in numbers))
    Console().print(table)
    write(options.json_file, "lab controller", rows, {})


if __name__ == "__main__":
    main()
