"""A whole step of local updates without communication, compared with torch's SGD in one run on one core."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from ..comm.world import LocalWorld
from ..updates import LocalUpdates
from .method_spec import UpdatesSpec

TENSORS = 20
WARM_UP = 3


class Layers(nn.Module):
    """`elements` parameters with gradients, in tensors of equal size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        size = (max(1, elements // TENSORS // 1000), min(1000, elements))
        self.layers = nn.ParameterList(torch.randn(size, generator=generator) for _ in range(TENSORS))
        for parameter in self.layers:
            parameter.grad = torch.randn(size, generator=generator)


def run(elements: int, updates: UpdatesSpec, repetitions: int) -> tuple[list[float], list[float], float]:
    """Seconds of `LocalUpdates.step()` and of `torch.optim.SGD.step()`, in turn, and the bytes per step of the former."""
    torch.set_num_threads(1)
    ours, theirs = Layers(elements), Layers(elements)
    inner = torch.optim.SGD(ours.parameters(), lr=1e-3, momentum=0.9)
    opt = LocalUpdates(inner, ours, updates.codec, updates.feedback, updates.period, LocalWorld(1))
    sgd = torch.optim.SGD(theirs.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    seconds: tuple[list[float], list[float]] = ([], [])
    steps: tuple[Callable[[], object], Callable[[], object]] = (opt.step, sgd.step)
    for _ in range(WARM_UP + repetitions):
        for times, step in zip(seconds, steps, strict=True):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
    return seconds[0][WARM_UP:], seconds[1][WARM_UP:], float(opt.stats()["bytes_per_step"])


def ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(ours) / statistics.median(theirs)
