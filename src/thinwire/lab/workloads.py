"""Models to train on the emulated cluster: plain PyTorch, small enough for one core, with large gradients.

| name   | model                                    | parameters | what it stresses                                |
|--------|------------------------------------------|------------|-------------------------------------------------|
| gpt    | 6 blocks of width 384, 64 bytes of text  | 10.9 M     | many tensors of medium size, as transformers do |
| gpt-small | 4 blocks of width 192                 | 1.9 M      | the same, with shorter steps                    |
| gpt-ngrams | 2 blocks of width 96, tables of n-grams | 1.1 M     | few elements hold most of a gradient: the demo  |
| vgg    | 5 convolutions, then one dense 4096x2048 | 8.9 M      | one layer with nearly all parameters            |
| resnet | ResNet-20 for CIFAR, width 32            | 1.1 M      | computation long, gradients small               |
| lstm   | 30 000 words of 256, LSTM of 256         | 8.7 M      | an embedding whose gradient is mostly zero      |

    work = load("gpt")
    model = work.model()
    work.loss(model, work.batch(step=0, rank=3)).backward()

Batches depend only on (seed, step, rank). Generated data can be learned: text is a random walk over a fixed table of
successors, an image is the pattern of its class plus noise.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..suggest import suggest
from .netns import LabError

Batch = tuple[Tensor, Tensor]  # inputs, targets


@dataclass(frozen=True)
class Workload:
    """A model, its data and its loss."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[torch.Generator], Batch]
    seed: int = 0

    def model(self) -> nn.Module:
        """The model with its initial weights, the same on every rank. The global random state is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    def batch(self, step: int, rank: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {step} {rank}".encode()))
        return self.data(generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy of the outputs (..., classes) and the targets (...)."""
        inputs, targets = batch
        outputs = model(inputs)
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def load(name: str, data: str | Path | None = None, batch_size: int | None = None, seed: int = 0) -> Workload:
    """One of "gpt", "gpt-small", "gpt-ngrams", "vgg", "resnet", "lstm"; `data` is a text file for the GPTs (bytes) and lstm
    (words)."""
    check(name)
    build, source, size = _WORKLOADS[name]
    if data is not None and source is not _words and source is not _bytes:
        raise LabError(f"workload {name!r} has generated images and reads no file: omit {str(data)!r}")
    path = None if data is None else Path(data)
    return Workload(name, build, source(path, batch_size or size, seed), seed)


def check(name: str) -> None:
    if name not in _WORKLOADS:
        raise LabError(f"there is no workload {name!r}; {suggest(name, _WORKLOADS)}")


# Text.


def _text(tokens: Tensor, batch_size: int, length: int) -> Callable[[torch.Generator], Batch]:
    """Random pieces of a text, and the same shifted by one token, for next-token prediction."""
    if len(tokens) < length + 2:
        raise LabError(f"a text of {len(tokens)} tokens is too short: pieces have {length + 1}")

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(tokens) - length - 1, (batch_size,), generator=generator)
        pieces = tokens[starts[:, None] + torch.arange(length + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    return draw


def _walk(vocabulary: int, length: int, seed: int) -> Tensor:
    """Tokens that are each followed by one of four others, with skewed frequencies like words in a text."""
    generator = torch.Generator().manual_seed(seed)
    successors = (vocabulary * torch.rand(vocabulary, 4, generator=generator) ** 3).long().tolist()
    choices = torch.randint(4, (length,), generator=generator).tolist()
    tokens = [0]
    for choice in choices:
        tokens.append(successors[tokens[-1]][choice])
    return torch.tensor(tokens)


def _bytes(path: Path | None, batch_size: int, seed: int) -> Callable[[torch.Generator], Batch]:
    tokens = _walk(64, 100_000, seed) if path is None else torch.tensor(list(_read(path)))
    return _text(tokens, batch_size, length=GPT.context)


def _words(path: Path | None, batch_size: int, seed: int) -> Callable[[torch.Generator], Batch]:
    if path is None:
        tokens = _walk(LSTM.vocabulary, 200_000, seed)
    else:
        words = _read(path).decode(errors="replace").split()
        common = Counter(words).most_common(LSTM.vocabulary - 1)
        number = {word: index + 1 for index, (word, _) in enumerate(common)}  # 0: all rarer words
        tokens = torch.tensor([number.get(word, 0) for word in words])
    draw = _text(tokens, batch_size, length=32)

    def draw_common(generator: torch.Generator) -> Batch:
        inputs, targets = draw(generator)
        return inputs, torch.where(targets < LSTM.answers, targets, 0)

    return draw_common


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise LabError(f"cannot read the text {str(path)!r}: {error.strerror}") from None


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A small GPT over bytes. Tokens (batch, context) to logits (batch, context, vocabulary)."""

    context = 64

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(self.context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class NGramGPT(nn.Module):
    """A small GPT that adds what tables of the last two, three and four bytes predict. Tokens (batch, context) to logits.

    Most parameters are in the tables, as in models of many words most are in the embeddings: plain SGD trains them well, and
    few elements hold most of a gradient. Rows are shared by all n-grams of the same hash.
    """

    longest, row_bits = 4, 10
    quiet = 0.03
    """Factor of the head's outputs, whose learning rate would otherwise have to be lower than that of the tables."""

    def __init__(self, layers: int = 2, width: int = 96, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.gpt = GPT(layers, width, heads, vocabulary)
        nn.init.normal_(self.gpt.head.weight, std=0.02 / self.quiet)
        self.tables = nn.ModuleList(nn.Embedding(1 << self.row_bits, vocabulary) for _ in range(2, self.longest + 1))
        for table in self.tables:
            nn.init.zeros_(table.weight)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.quiet * self.gpt(tokens)
        key, factor = tokens, 1
        for back, table in enumerate(self.tables, 1):
            factor = factor * 0x01000193 % (1 << 32)
            key = (key + factor * functional.pad(tokens, (back, 0))[:, : tokens.shape[1]]) % (1 << 32)
            logits = logits + table((key * 0x61C88647 % (1 << 32)) >> (32 - self.row_bits))
        return logits


class LSTM(nn.Module):
    """Reads a large vocabulary and predicts common words. Tokens (batch, length) to logits (..., answers)."""

    vocabulary = 30_000
    answers = 2_000

    def __init__(
        self, vocabulary: int = vocabulary, width: int = 256, hidden: int = 256, answers: int = answers
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, answers)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states)  # type: ignore[no-any-return]


# Images, 3 x 32 x 32 in 10 classes.


def _images(path: Path | None, batch_size: int, seed: int) -> Callable[[torch.Generator], Batch]:
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(seed))

    def draw(generator: torch.Generator) -> Batch:
        classes = torch.randint(10, (batch_size,), generator=generator)
        noise = torch.randn(batch_size, 3, 32, 32, generator=generator)
        return patterns[classes] + noise, classes

    return draw


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in ((32, True), (64, True), (128, False), (128, True), (256, False)):
        layers += [_convolution(channels, width), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 16, 2048), nn.ReLU(), nn.Linear(2048, 10))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(inputs, outputs, stride), nn.ReLU(), _convolution(outputs, outputs))
        same = inputs == outputs and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


def resnet(width: int = 32, depth: int = 3) -> nn.Module:
    layers: list[nn.Module] = [_convolution(3, width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for block in range(depth):
            outputs = width << stage
            layers.append(Residual(channels, outputs, stride=2 if stage and not block else 1))
            channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


Source = Callable[[Path | None, int, int], Callable[[torch.Generator], Batch]]

_WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Source, int]] = {
    "gpt": (GPT, _bytes, 4),
    "gpt-small": (lambda: GPT(layers=4, width=192), _bytes, 8),
    "gpt-ngrams": (NGramGPT, _bytes, 16),
    "vgg": (vgg, _images, 16),
    "resnet": (resnet, _images, 8),
    "lstm": (LSTM, _words, 16),
}
