"""Kernel benchmark: encode and decode of every codec relative to `residual.add_(gradient)`, in one run on one core.

Each repetition runs everything once, in turn, so that noise affects all alike. Codecs run in their error-feedback loop on all
ranks; only rank 0 is timed. Results are medians, and ratios to the floor of the same run.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..codecs import Codec, parse
from ..comm.collectives import Collective
from ..comm.world import LocalWorld
from ..engine.layout import build, describe
from ..engine.rank_state import RankState
from . import bench_updates
from .method_spec import parse_updates

WARM_UP = 8
UPDATES = ("updates(randomblock(ratio=64), 0.3)",)


def default_codecs(density: float, ranks: int) -> list[tuple[str, int]]:
    """The default benchmark: (codec, ranks)."""
    d = f"density={density:g}"
    return [
        (f"micro({d})", ranks),
        (f"micro({d}, values='fp16')", ranks),
        (f"micro({d})", 4 * ranks),
        (f"laplace({d}, values='fp16')", ranks),
        (f"laplace({d}, exact=True)", ranks),
        ("adacomp", ranks),
        ("adacomp(bin_dense=50)", ranks),
        (f"randomblock(ratio={1 / density:g})", ranks),
        (f"randomk({d})", ranks),
        (f"dgc({d}, values='fp16')", ranks),
        (f"sidco({d})", ranks),
        (f"topk({d})", ranks),
        ("cast", ranks),
        ("int8", ranks),
        ("sign", ranks),
        ("lowrank", ranks),
    ]


@dataclass
class Run:
    """A codec in its error-feedback loop: times of rank 0, and the traffic of all ranks."""

    text: str
    ranks: int
    elements: int
    codec: Codec = field(init=False)
    rank_states: list[RankState] = field(init=False)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    bits: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.codec = parse(self.text)
        rows = max(1, math.isqrt(self.elements))
        shape = (rows, self.elements // rows)
        layout = build([[describe("weight", torch.empty(shape, device="meta"))]], self.codec, min_elements=0)
        self.rank_states = [RankState(layout, rank, self.ranks) for rank in range(self.ranks)]
        self.world = LocalWorld(self.ranks)
        self.buffers = [torch.empty(shape).view(-1) for _ in range(self.ranks)]
        self.riders = torch.zeros(0)

    def step(self, gradients: list[Tensor], turn: int, keep: bool) -> None:
        """One exchange on all ranks. Phases: select (to the first collective), encode (to the last), decode."""
        runs: list[Generator[Collective, None, None]] = []
        for rank, (rank_state, buffer) in enumerate(zip(self.rank_states, self.buffers, strict=True)):
            buffer.copy_(gradients[(turn + rank) % len(gradients)][: buffer.numel()])
            runs.append(rank_state.run(0, buffer, self.riders))
        marks = [0.0]
        gathered = summed = 0
        while True:
            parts: list[Collective] = []
            for rank, run in enumerate(runs):
                begun = time.perf_counter()
                part = next(run, None)
                if rank == 0:
                    marks.append(time.perf_counter() - begun)
                if part is not None:
                    parts.append(part)
            if not parts:
                break
            if parts[0].operation == "gather":
                gathered += 8 * sum(part.bytes for part in parts)
            else:
                summed += 8 * parts[0].bytes
            self.world.issue(0, parts, lambda: None)
        if keep:
            for phase, seconds in (("select", marks[1]), ("encode", sum(marks[1:-1])), ("decode", marks[-1])):
                self.seconds.setdefault(phase, []).append(seconds)
            each = [rank_state.groups[0].way.entries for rank_state in self.rank_states]
            entries = each[0] if summed else sum(each)  # all ranks send values of the same places
            if entries:
                # A gathered value comes with its index in one rank's message; a summed one belongs to all ranks.
                self.bits.append((gathered + summed) / entries)
        for rank_state in self.rank_states:
            rank_state.finish()


@dataclass
class InPlace:
    """MiCRO's kernels without messages: accumulate, flag and select in place; then take and clear all ranks' places."""

    ranks: int
    elements: int
    density: float
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.residual = np.zeros(self.elements, np.float32)
        count = max(1, int(self.density * self.elements))
        self.chosen = np.empty(2 * count // self.ranks + 64, np.int32)
        places = np.random.default_rng(0).choice(self.elements, count, replace=False)
        self.support = np.sort(places).astype(np.int32)
        self.values = np.empty(count, np.float32)

    def step(self, gradients: list[Tensor], turn: int, keep: bool) -> None:
        gradient = gradients[turn % len(gradients)].numpy()
        size = self.elements // self.ranks
        start = turn % self.ranks * size
        share = max(1, round(self.density * size))
        magnitudes = np.abs(self.residual[start : start + size] + gradient[start : start + size])
        threshold = np.partition(magnitudes, size - share)[size - share]
        ends, thresholds = np.array([self.elements]), np.array([threshold], np.float32)
        begun = time.perf_counter()
        kernels.sliced.accumulate_select_segments(
            self.residual, gradient, start, start + size, ends, thresholds, self.chosen
        )
        selected = time.perf_counter()
        kernels.basic.take(self.residual, self.support, self.values)
        ended = time.perf_counter()
        if keep:
            self.seconds.setdefault("in place", []).append(selected - begun)
            self.seconds.setdefault("with take", []).append(ended - begun)


def gradients_of(elements: int, count: int = 3, seed: int = 0) -> list[Tensor]:
    """Gradients whose scale varies by block, as it does by layer."""
    generator = torch.Generator().manual_seed(seed)
    blocks = max(1, elements // 4096)
    scale = torch.exp(torch.randn(blocks, generator=generator)).repeat_interleave(-(-elements // blocks))[:elements]
    return [torch.randn(elements, generator=generator) * scale for _ in range(count)]


def eager(residual: Tensor, gradient: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Threshold selection written with torch operations."""
    residual.add_(gradient)
    return _taken(residual, (residual.abs() >= threshold).nonzero().squeeze(1))


def topk(residual: Tensor, gradient: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The usual top-k hook."""
    residual.add_(gradient)
    return _taken(residual, residual.abs().topk(k, sorted=False).indices)


def sampled(residual: Tensor, gradient: Tensor, k: int, sample: float = 0.01) -> tuple[Tensor, Tensor]:
    """DGC's hierarchical sampling as usually written: the threshold of a sample, and another top-k if it was too low."""
    residual.add_(gradient)
    magnitudes = residual.abs()
    places = torch.randint(len(residual), (max(1, int(len(residual) * sample)),))
    threshold = magnitudes[places].topk(max(1, int(k * sample)), sorted=False).values.min()
    indices = (magnitudes >= threshold).nonzero().squeeze(1)
    if len(indices) > 1.3 * k:
        indices = indices[magnitudes[indices].topk(k, sorted=False).indices]
    return _taken(residual, indices)


def _taken(residual: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    values = residual[indices]
    residual[indices] = 0
    return indices, values


def entropy_bits(density: float) -> float:
    """Lower bound of the bits per selected place, for random places with this density."""
    if density >= 1.0:
        return 0.0
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)


def _time(work: Callable[[], object], seconds: list[float]) -> None:
    begun = time.perf_counter()
    work()
    seconds.append(time.perf_counter() - begun)


def run(
    elements: int,
    density: float,
    ranks: int,
    repetitions: int,
    codecs: list[tuple[str, int]],
    progress: Callable[[], None] = lambda: None,
    updates: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Rows of the result file. Whole steps of the local updates in `updates` are compared with SGD's."""
    torch.set_num_threads(1)
    gradients = gradients_of(elements)
    k = max(1, round(density * elements))
    threshold = float(gradients[0].abs().topk(k).values[-1])
    residuals = {phase: torch.zeros(elements) for phase in ("floor", "eager", "sampled", "topk")}
    plain: dict[str, list[float]] = {phase: [] for phase in residuals}
    runs = [Run(text, count, elements) for text, count in codecs]
    floors = [InPlace(count, elements, density) for text, count in codecs if text == f"micro(density={density:g})"]
    for turn in range(WARM_UP + repetitions):
        keep = turn >= WARM_UP
        gradient = gradients[turn % len(gradients)]
        baselines: dict[str, Callable[[], object]] = {
            "floor": partial(residuals["floor"].add_, gradient),
            "eager": partial(eager, residuals["eager"], gradient, threshold),
            "sampled": partial(sampled, residuals["sampled"], gradient, k),
            "topk": partial(topk, residuals["topk"], gradient, k),
        }
        slow_ones = turn >= WARM_UP - 1
        jobs: list[Callable[[], None]] = [
            partial(_time, work, plain[phase] if keep else [])
            for phase, work in baselines.items()
            if phase == "floor" or slow_ones
        ]
        parts: list[InPlace | Run] = [*floors, *runs]
        jobs += [partial(part.step, gradients, turn, keep) for part in parts]
        # Random order: `topk` disturbs caches and allocator for whatever follows it.
        random.Random(turn).shuffle(jobs)
        for job in jobs:
            job()
        progress()
    floor, slow = statistics.median(plain["floor"]), statistics.median(plain["topk"])

    def row(
        codec: str, phase: str, count: int, seconds: list[float], bits: list[float], value_bits: int
    ) -> dict[str, Any]:
        median = statistics.median(seconds)
        return {
            "codec": codec,
            "phase": phase,
            "elements": elements,
            "density": density,
            "ranks": count,
            "seconds": median,
            "ratio_to_add": median / floor,
            "selection_seconds": median - floor if phase in ("select", "eager", "sampled", "topk") else None,
            "speedup_over_topk": slow / median,
            "bits_per_selected": statistics.median(bits) if bits else None,
            "entropy_bits": entropy_bits(density) + value_bits if bits else None,
            "ratio_to_sgd": None,
        }

    rows = [row("none", phase, 1, seconds, [], 0) for phase, seconds in plain.items()]
    for part in floors:
        rows += [row(f"micro(density={density:g})", p, part.ranks, s, [], 0) for p, s in part.seconds.items()]
    for codec in runs:
        value_bits = {"fp32": 32, "fp16": 16, "bf16": 16}.get(getattr(codec.codec, "values", ""), 0)
        for phase, seconds in codec.seconds.items():
            bits = codec.bits if phase == "encode" and value_bits else []
            rows.append(row(codec.text, phase, codec.ranks, seconds, bits, value_bits))
    for text in updates:
        method = parse_updates(text)
        assert method is not None
        ours, theirs, _ = bench_updates.run(elements, method, repetitions)
        rows.append(row("none", "sgd", 1, theirs, [], 0))
        rows.append(row(text, "step", 1, ours, [], 0) | {"ratio_to_sgd": bench_updates.ratio(ours, theirs)})
    return rows
