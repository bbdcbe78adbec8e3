"""Public datasets in a directory: images, characters, words. Batches depend only on (seed, step).

| file                                   | read by                             |
|----------------------------------------|-------------------------------------|
| mnist.npz, cifar10.npz                 | `images`: x_train, y_train, x_test, y_test, uint8 |
| tinyshakespeare.txt                    | `characters`: the last tenth is for validation    |
| wikitext2.{train,valid}.txt.gz         | `words`                                           |

The batch of a step is drawn for all workers together, then cut into equal pieces, so that all methods and numbers of workers
see the same data in the same order.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .netns import LabError

Batch = tuple[Tensor, Tensor]  # inputs, targets


def generator(*words: object) -> torch.Generator:
    """A random generator seeded by these words."""
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, words)).encode()))


class Samples(Protocol):
    """Training or test data."""

    def __len__(self) -> int:
        """Samples in an epoch."""

    def batch(self, seed: int, step: int, size: int, piece: slice) -> Batch:
        """A piece of the batch of a step, which has `size` samples."""

    def chunks(self, size: int) -> Iterator[Batch]:
        """All samples once, in order, for evaluation."""


@dataclass
class Images:
    """uint8 [N, channels, rows, columns] and their classes [N], shuffled every epoch."""

    inputs: Tensor
    labels: Tensor
    mean: Sequence[float]
    std: Sequence[float]
    flips: bool = False
    """Whether half of the images of a batch are mirrored, at random."""
    _order: tuple[tuple[int, int], Tensor] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, seed: int, step: int, size: int, piece: slice) -> Batch:
        epoch, place = divmod(step, len(self) // size)
        if self._order is None or self._order[0] != (seed, epoch):
            order = torch.randperm(len(self), generator=generator("order", seed, epoch))
            self._order = ((seed, epoch), order)
        chosen = self._order[1][place * size : (place + 1) * size][piece]
        inputs = self._floats(self.inputs[chosen])
        if self.flips:
            mirrored = torch.rand(size, generator=generator("flips", seed, step))[piece] < 0.5
            inputs[mirrored] = inputs[mirrored].flip(3)
        return inputs, self.labels[chosen]

    def chunks(self, size: int) -> Iterator[Batch]:
        for begin in range(0, len(self), size):
            yield self._floats(self.inputs[begin : begin + size]), self.labels[begin : begin + size]

    def _floats(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        floats = (images.float() / 255.0 - mean) / std
        # Faster with channels-last weights, harmless with others.
        return floats.contiguous(memory_format=torch.channels_last) if floats.shape[1] > 1 else floats


@dataclass
class Text:
    """Tokens [N]; samples are `length` tokens and the same shifted by one, for next-token prediction."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def batch(self, seed: int, step: int, size: int, piece: slice) -> Batch:
        starts = torch.randint(len(self.tokens) - self.length, (size,), generator=generator("pieces", seed, step))
        pieces = self.tokens[starts[piece, None] + torch.arange(self.length + 1)]
        return pieces[:, :-1], pieces[:, 1:]

    def chunks(self, size: int) -> Iterator[Batch]:
        whole = len(self) * self.length
        inputs, targets = (self.tokens[i : whole + i].view(-1, self.length) for i in (0, 1))
        yield from zip(torch.split(inputs, size), torch.split(targets, size), strict=True)


def images(path: Path, mean: Sequence[float], std: Sequence[float], flips: bool = False) -> tuple[Images, Images]:
    """Training and test images of an .npz."""
    parts = {}
    try:
        with np.load(path) as file:
            for key in ("x_train", "y_train", "x_test", "y_test"):
                parts[key] = torch.from_numpy(file[key])
    except (OSError, ValueError, KeyError) as error:
        raise LabError(f"{str(path)!r} is not an .npz with x_train, y_train, x_test, y_test: {error}") from None
    found = []
    for part in ("train", "test"):
        inputs, labels = parts[f"x_{part}"], parts[f"y_{part}"].long()
        if inputs.dtype != torch.uint8 or inputs.dim() not in (3, 4) or len(inputs) != len(labels):
            raise LabError(
                f"{str(path)!r}: x_{part} must be uint8 images, one for each of y_{part}, not {tuple(inputs.shape)}"
            )
        inputs = inputs[:, None] if inputs.dim() == 3 else inputs.permute(0, 3, 1, 2).contiguous()
        found.append(Images(inputs, labels, mean, std, flips and part == "train"))
    return found[0], found[1]


def characters(path: Path, length: int) -> tuple[Text, Text, int]:
    """The first nine tenths of a text for training, the rest for validation, and the vocabulary size."""
    try:
        letters = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise LabError(f"cannot read the text {str(path)!r}: {error.strerror}") from None
    known, tokens = np.unique(letters, return_inverse=True)
    ids = torch.from_numpy(tokens.astype(np.int64))
    cut = int(0.9 * len(ids))
    return _text(path, ids[:cut], length), _text(path, ids[cut:], length), len(known)


def words(directory: Path, length: int) -> tuple[Text, Text, int]:
    """WikiText-2 for training and validation, words numbered by descending frequency, and the vocabulary size."""
    parts = {}
    for part in ("train", "valid"):
        path = directory / f"wikitext2.{part}.txt.gz"
        try:
            with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                parts[part] = [word for line in file for word in [*line.split(), "<eos>"]]
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise LabError(f"cannot read the text {str(path)!r}: {error}") from None
    known, inverse, counts = np.unique(np.array(parts["train"]), return_inverse=True, return_counts=True)
    place = np.empty(len(known), np.int64)
    place[np.argsort(-counts, kind="stable")] = np.arange(len(known))
    index = dict(zip(known.tolist(), place.tolist(), strict=True))
    unknown = next((word for word in parts["valid"] if word not in index), None)
    if unknown is not None:
        raise LabError(f"{str(directory)!r}: the word {unknown!r} of the validation text is not in the training text")
    train = torch.from_numpy(place[inverse])
    valid = torch.tensor([index[word] for word in parts["valid"]])
    return _text(directory, train, length), _text(directory, valid, length), len(known)


def _text(path: Path, tokens: Tensor, length: int) -> Text:
    if len(tokens) <= length:
        raise LabError(f"{str(path)!r}: {len(tokens)} tokens are too few for samples of {length} + 1 tokens")
    return Text(tokens, length)
