"""Models and training recipes on public data, for `thinwire bench converge`.

| name             | model                                                    | parameters | metric   |
|------------------|----------------------------------------------------------|------------|----------|
| mnist-cnn        | two convolutions, two dense layers                       | 215 k      | accuracy |
| cifar-resnet     | ResNet-8 on images of 12 x 16 x 16 (2 x 2 pixels folded) | 79 k       | accuracy |
| shakespeare-lstm | characters of 64, LSTM of 256                            | 351 k      | nats     |
| shakespeare-gpt  | 4 blocks of width 128, 64 characters                     | 0.8 M      | nats     |
| wikitext-lstm    | 33 k words of 128, LSTM of 256, adaptive softmax         | 7 M        | nats     |

    task = load("mnist-cnn", Path("data"))
    model = task.model(seed=0)
    task.loss(model, task.train.batch(seed=0, step=0, size=128, piece=slice(0, 32))).backward()
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import datasets
from .datasets import Batch, Samples
from .netns import LabError
from .workloads import GPT, LSTM, Residual

SCHEDULES = ("cosine", "steps", "constant")


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. `batch` is that of all workers together, so their number does not change the task."""

    lr: float
    batch: int
    steps: int
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of a worker's gradient, before the residual is added."""
    schedule: str = "cosine"
    """cosine: decay to zero; steps: a tenth after half of the steps, a hundredth after three quarters; constant."""
    warm_up: int = 0
    """Steps of linear learning rate warm-up."""

    def rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warm_up:
            return self.lr * (step + 1) / self.warm_up
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "steps":
            return self.lr * (1.0 if step < self.steps // 2 else 0.1 if step < self.steps * 3 // 4 else 0.01)
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * done))

    def make(self, parameters: Iterable[Tensor], corrected: float = 0.0) -> torch.optim.Optimizer:
        """`corrected` is momentum applied by the codec: the optimizer then has none.

        Weight decay does not pass through the codec, so it is scaled by the factor that momentum would have contributed.
        """
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.99), weight_decay=self.weight_decay)
        if corrected:
            decay = self.weight_decay / (1.0 - corrected)
            return torch.optim.SGD(parameters, lr=self.lr, weight_decay=decay)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class Task:
    """A model, its data, and its recipe. `metric` is "accuracy" (the higher the better) or "nats" (the lower)."""

    name: str
    metric: str
    build: Callable[[], nn.Module]
    train: Samples
    test: Samples
    recipe: Recipe
    own_loss: bool = False
    """Whether the model takes the targets too and returns the loss of each."""
    layout: torch.memory_format = torch.contiguous_format
    """Memory format of weights; convolutions are a third faster with channels-last."""

    def model(self, seed: int) -> nn.Module:
        """The model with its initial weights. The global random state is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def piece(self, rank: int, workers: int) -> slice:
        size = self.recipe.batch // workers
        return slice(rank * size, (rank + 1) * size)

    def batch(self, seed: int, step: int, rank: int, workers: int) -> Batch:
        return self.train.batch(seed, step, self.recipe.batch, self.piece(rank, workers))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._losses(model, batch)[0].mean()

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss of each target, and the outputs [targets, classes] if the model has any."""
        inputs, targets = batch
        if self.own_loss:
            return model(inputs, targets), None
        outputs = model(inputs).flatten(0, -2)
        return functional.cross_entropy(outputs, targets.flatten(), reduction="none"), outputs

    def better(self, value: float, than: float) -> bool:
        return value >= than if self.metric == "accuracy" else value <= than

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Mean loss and metric on all test data. The training mode of the model is restored."""
        training = model.training
        model.eval()
        loss, right, count = 0.0, 0, 0
        for batch in self.test.chunks(250):
            losses, outputs = self._losses(model, batch)
            loss += losses.double().sum().item()
            count += losses.numel()
            if self.metric == "accuracy":
                assert outputs is not None
                right += int((outputs.argmax(1) == batch[1]).sum())
        model.train(training)
        return loss / count, right / count if self.metric == "accuracy" else loss / count


def load(name: str, data: Path, **changes: Any) -> Task:
    """A task with its data, from files in the directory `data`; `changes` are fields of its recipe, or `epochs`."""
    if name not in TASKS:
        raise LabError(f"workload {name!r} does not exist: choose one of {', '.join(TASKS)}")
    if not data.is_dir():
        raise LabError(f"the directory {str(data)!r} with the data does not exist")
    task = TASKS[name](data)
    recipe = task.recipe
    epochs = changes.pop("epochs", None)
    changes = {key: value for key, value in changes.items() if value is not None}
    recipe = dataclasses.replace(recipe, **changes)
    if recipe.schedule not in SCHEDULES:
        raise LabError(f"the schedule {recipe.schedule!r} does not exist: choose one of {', '.join(SCHEDULES)}")
    if not 1 <= recipe.batch <= len(task.train):
        raise LabError(f"a batch of {recipe.batch}: choose 1 to {len(task.train)}, the number of training samples")
    default = EPOCHS.get(name) if recipe.steps == 0 else None
    if epochs or default:
        steps = round((epochs or default or 0) * (len(task.train) // recipe.batch))
        recipe = dataclasses.replace(recipe, steps=max(1, steps))
    return dataclasses.replace(task, recipe=recipe)


# The tasks.


class WordLSTM(nn.Module):
    """Words (batch, length) and next words to the loss of each; rare words use a cheaper part of the softmax."""

    def __init__(self, vocabulary: int, width: int = 128, hidden: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        cuts = [cut for cut in (2_000, 10_000) if cut < vocabulary]
        self.head = nn.AdaptiveLogSoftmaxWithLoss(hidden, vocabulary, cuts or [vocabulary // 2])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return -self.head(states.flatten(0, 1), targets.flatten()).output  # type: ignore[no-any-return]


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def resnet8(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.PixelUnshuffle(2), nn.Conv2d(12, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10),
    )  # fmt: skip


def _mnist(data: Path) -> Task:
    train, test = datasets.images(data / "mnist.npz", [0.1307], [0.3081])
    recipe = Recipe(lr=0.05, batch=128, steps=0, weight_decay=1e-4, warm_up=50)
    return Task("mnist-cnn", "accuracy", mnist_cnn, train, test, recipe)


def _cifar(data: Path) -> Task:
    mean, std = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    train, test = datasets.images(data / "cifar10.npz", mean, std, flips=True)
    # Dense training converges equally with batches of 128 and four times the learning rate. Residuals are delayed by a
    # number of steps, so smaller steps lose less.
    recipe = Recipe(lr=0.025, batch=32, steps=0, weight_decay=5e-4, warm_up=100)
    return Task("cifar-resnet", "accuracy", resnet8, train, test, recipe, layout=torch.channels_last)


def _shakespeare_lstm(data: Path) -> Task:
    train, test, vocabulary = datasets.characters(data / "tinyshakespeare.txt", 64)
    recipe = Recipe(lr=2.0, batch=16, steps=1000, clip=1.0, warm_up=50)
    return Task("shakespeare-lstm", "nats", lambda: LSTM(vocabulary, 64, 256, vocabulary), train, test, recipe)


def _shakespeare_gpt(data: Path) -> Task:
    train, test, vocabulary = datasets.characters(data / "tinyshakespeare.txt", GPT.context)
    recipe = Recipe(lr=2e-3, batch=12, steps=2000, optimizer="adamw", weight_decay=0.1, clip=1.0, warm_up=100)
    return Task("shakespeare-gpt", "nats", lambda: GPT(4, 128, 4, vocabulary=vocabulary), train, test, recipe)


def _wikitext(data: Path) -> Task:
    train, test, vocabulary = datasets.words(data, 32)
    recipe = Recipe(lr=1e-3, batch=32, steps=2000, optimizer="adamw", clip=1.0, warm_up=100)
    return Task("wikitext-lstm", "nats", lambda: WordLSTM(vocabulary), train, test, recipe, own_loss=True)


EPOCHS = {"mnist-cnn": 3, "cifar-resnet": 8}
"""Default epochs of tasks whose recipe has no number of steps."""

TASKS: dict[str, Callable[[Path], Task]] = {
    "mnist-cnn": _mnist,
    "cifar-resnet": _cifar,
    "shakespeare-lstm": _shakespeare_lstm,
    "shakespeare-gpt": _shakespeare_gpt,
    "wikitext-lstm": _wikitext,
}
