"""What the golden files hold, and how it is run: shared by `make.py`, which writes, and the tests, which compare.

Inputs are stored integers (`files/inputs.npz`): a mantissa and a power of two for each place of a short table. A tensor of step
s on rank r begins to read it at a place that follows from s, r and its name, and goes around. So no generator and no
transcendental function is between the file and the gradient, and sums of several ranks are rounded.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

import thinwire

FILES = Path(__file__).parent / "files"

STEPS = 20
"""Length of a trajectory."""
BEFORE, AFTER = 6, 5
"""Steps before a checkpoint is written, and after it was read."""

SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (40, 24),
    "kernel": (8, 4, 3, 3),
    "bias": (24,),
    "wide": (7, 50),
    "scalar": (),
    "nothing": (0,),
}
LARGE: dict[str, tuple[int, ...]] = {"matrix": (250, 150), "bias": (150,), "kernel": (20, 10, 3, 3)}
"""Enough elements for several tiles of a kernel, and for borders that MiCRO moves."""


@functools.cache
def _table() -> Tensor:
    with np.load(FILES / "inputs.npz") as stored:
        return torch.from_numpy(np.ldexp(stored["mantissa"].astype(np.float32), stored["exponent"].astype(np.int32)))


def values(name: str, shape: Sequence[int], step: int, rank: int) -> Tensor:
    """A tensor of stored numbers, float32."""
    table = _table()
    start = (zlib.crc32(name.encode()) + 7919 * step + 104_729 * rank) % table.numel()
    count = math.prod(shape)
    return table.roll(-start).repeat(count // table.numel() + 1)[:count].view(tuple(shape)).clone()


def gradients(shapes: Mapping[str, Sequence[int]], step: int, rank: int, dtype: str = "float32") -> dict[str, Tensor]:
    return {name: values(name, shape, step, rank).to(getattr(torch, dtype)) for name, shape in shapes.items()}


# -- comparing ---------------------------------------------------------------------------------------------------------


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Equal exactly when all tensors are equal bit for bit."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        whole.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()[:16]


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str) -> None:
    """Equal up to a share of the largest value of a tensor; bit for bit if the tolerance is 0."""
    assert sorted(found) == sorted(expected), what
    for name, value in expected.items():
        mine = found[name]
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape), f"{what}: {name}"
        if tolerance == 0.0:
            assert digest({"": mine}) == digest({"": value}), f"{what}: {name} has other bits"
        elif value.numel():
            largest = float(value.double().abs().max())
            off = float((mine.double() - value.double()).abs().max())
            assert off <= tolerance * largest, f"{what}: {name} is off by {off:g}, the largest value is {largest:g}"


def decoded(array: Mapping[str, Any]) -> Tensor:
    """A tensor in the text of a checkpoint."""
    dtype = getattr(torch, array["dtype"])
    data = bytearray(base64.b64decode(array["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(tuple(array["shape"]))


def alike(found: Any, expected: Any, tolerance: float, where: str) -> None:
    """Texts of checkpoints, parsed: all fields are there, and numbers are equal up to `tolerance`."""
    if isinstance(expected, dict) and expected.keys() == {"dtype", "shape", "data"}:
        close({where: decoded(found)}, {where: decoded(expected)}, tolerance, where)
    elif isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), f"{where}: other fields, or another order"
        for key, value in expected.items():
            if key not in ("version", "versions"):
                alike(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for place, value in enumerate(expected):
            alike(found[place], value, tolerance, f"{where}[{place}]")
    elif isinstance(expected, float) and tolerance:
        assert found == expected or abs(found - expected) <= tolerance * abs(expected), where
    else:
        assert (type(found), found) == (type(expected), expected), where


def same_form(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Two states of the same keys, kinds of tensors and fields of texts, whatever their numbers are."""

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.shape
        if isinstance(value, dict):
            return [(key, "text" if key == "data" else form(item)) for key, item in value.items()]
        return [form(item) for item in value[:1]] if isinstance(value, list) else type(value)

    assert sorted(found) == sorted(expected), f"{what}: other keys"
    for key, value in expected.items():
        one, other = (json.loads(each) if isinstance(each, str) else each for each in (found[key], value))
        assert form(one) == form(other), f"{what}: {key}"


def same_state(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, texts: float, what: str
) -> None:
    """Two states: the same keys, tensors and texts, but for the version that wrote them."""
    assert sorted(found) == sorted(expected), f"{what}: other keys"
    tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
    close({key: found[key] for key in tensors}, tensors, tolerance, what)
    for key in expected.keys() - tensors.keys():
        alike(json.loads(found[key]), json.loads(expected[key]), texts, f"{what}: {key}")


def changed(codec: str) -> bool:
    """Whether a codec gives other numbers than when its checkpoints were written.

    They are read, and what the steps after them give is recorded as it is now; but a run from the beginning comes to other
    numbers, and only the form of its state is compared.
    """
    return codec.startswith(("laplace", "micro"))


def stored_state(folder: Path) -> dict[str, Any]:
    """Everything in the files of a checkpoint, read without thinwire."""
    state: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            state |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            state |= {key: text for key, text in file.metadata().items() if key != "step"}
    return state


# -- exchanges ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An exchange on a `LocalWorld`. `tolerance`: with matrix products of torch, whose rounding depends on the CPU."""

    text: str
    ranks: int = 3
    nodes: int = 1
    shapes: str = "small"
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[int, float] = field(default_factory=dict)
    """Densities that are set by hand before a step."""
    bad: tuple[int, ...] = ()
    """Steps in which a gradient holds a NaN."""
    dtype: str = "float32"
    note: str = ""

    @property
    def name(self) -> str:
        extra = f" {self.note}" if self.note else ""
        return f"{self.text} on {self.nodes}x{self.ranks // self.nodes}{extra}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")

    @property
    def tolerance(self) -> float:
        return 1e-6 if "lowrank" in self.text else 0.0

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"small": SHAPES, "large": LARGE}[self.shapes]

    def exchange(self, ranks: int = 0) -> thinwire.Exchange:
        named = {name: torch.zeros(shape, dtype=getattr(torch, self.dtype)) for name, shape in self.tensors.items()}
        world = thinwire.LocalWorld(ranks or self.ranks, None if ranks else self.ranks // self.nodes)
        return thinwire.Exchange(named, self.text, world, **{"min_elements": 64, "group_bytes": 5000, **self.options})

    def steps(self, exchange: thinwire.Exchange, steps: range, ranks: int = 0) -> Iterator[dict[str, Tensor]]:
        """The means of each step, which are the same on all ranks."""
        for step in steps:
            if step in self.settings:
                exchange.set(density=self.settings[step])
            given = [gradients(self.tensors, step, rank, self.dtype) for rank in range(ranks or self.ranks)]
            if step in self.bad:
                given[1]["matrix"].view(-1)[5] = float("nan")
            exchange.reduce_(given)
            for rank, mine in enumerate(given):
                # What a void step leaves in the gradients is not to be used; all that counts is that it is void.
                assert step in self.bad or digest(mine) == digest(given[0]), f"{self.name}, step {step}, rank {rank}"
            assert exchange.skipped_last_step == (step in self.bad), f"{self.name}, step {step}"
            yield {} if step in self.bad else given[0]


_SUMS = "iRS comp eARc dec iAG"

REGISTERED = {
    "dense": "dense",
    "cast": "cast",
    "topk": "topk(density=0.05)",
    "laplace": "laplace(density=0.05)",
    "micro": "micro(density=0.05)",
    "adacomp": "adacomp",
    "randomblock": "randomblock(ratio=8)",
    "randomk": "randomk(density=0.05)",
    "dgc": "dgc(density=0.05)",
    "sidco": "sidco(density=0.05)",
    "int8": "int8",
    "sign": "sign",
    "lowrank": "lowrank(rank=2)",
}
"""A text for every codec of thinwire."""

_VARIANTS = [
    "cast(dtype='fp16')",
    "topk(density=0.05, values='fp16')",
    "topk(density=0.05, values='bf16')",
    "topk(density=0.05, momentum=0.5)",
    "topk(density=Warmup(0.02, steps=12))",
    "topk(density=1.0)",
    "laplace(density=0.05, exact=True)",
    "laplace(density=0.05, momentum=0.5)",
    "laplace(density=0.05, values='bf16')",
    "micro(density=0.05, balance=False)",
    "micro(density=0.05, values='fp32')",
    "micro(density=0.05, values='fp16')",
    "micro(density=0.05, momentum=0.5)",
    "micro(density=0.05, threshold='layer')",
    "micro(density=0.05, controller='fixed')",
    "micro(density=0.05, controller='paper_code', start_from='formula')",
    "micro(density=Warmup(0.02, steps=12))",
    "adacomp(bin_conv=20, bin_dense=100)",
    "adacomp(scale='layer')",
    "randomblock(ratio=8, seed=3)",
    "dgc(density=0.05, momentum=0.5)",
    "dgc(density=0.05, values='fp16')",
    "sidco(density=0.05, momentum=0.5)",
    "int8 via J",
    "lowrank(rank=3, seed=5)",
]

CHAINS = [
    *(f"topk(density=0.05) via {letter}" for letter in "BCDEFGHIJK"),
    "dense via A",
    "dense via iR eAR iB",
    "dense via fRS fAG",
    "dense via iRS eR eB iAG",
    "topk(density=0.05) via fR comp fBc dec",
    "topk(density=0.05) via comp fGc dec fB",
    "topk(density=0.05) via comp fGc dec comp fBc dec",
    "topk(density=0.05) via iR comp eAGc dec iB",
    "topk(density=0.05) via comp iGc dec eAR iB",
    "topk(density=0.05) via comp@cpu fAGc dec@cpu",
    "topk(density=0.05, momentum=0.5) via B",
    "laplace(density=0.05) via D",
    "sidco(density=0.05) via B",
    "adacomp via B",
    "sign via D",
    "int8 via D",
    "int8 via B",
    f"micro(density=0.05) via {_SUMS}",
    f"randomblock(ratio=8) via {_SUMS}",
    f"randomk(density=0.05) via {_SUMS}",
    f"cast via {_SUMS}",
    f"lowrank(rank=2) via {_SUMS}",
]

TRAJECTORIES = [
    *(Case(text) for text in REGISTERED.values()),
    *(Case(text, ranks=4) for text in _VARIANTS),
    *(Case(text, ranks=4, nodes=2) for text in CHAINS),
    *(Case(text, ranks=4, shapes="large", options={"group_bytes": 1 << 20}) for text in REGISTERED.values()),
    Case("topk(density=0.05)", options={"exclude": ["kernel"]}, note="one excluded"),
    Case("micro(density=0.05)", options={"exclude": ["kernel", "b*"]}, note="some excluded"),
    Case("topk(density=0.05)", options={"min_elements": 0}, note="small ones too"),
    Case("randomblock(ratio=8)", options={"min_elements": 0}, note="small ones too"),
    Case("topk(density=0.05)", dtype="bfloat16", note="bfloat16"),
    Case("micro(density=0.05)", dtype="float16", note="float16"),
    Case("topk(density=0.05)", settings={4: 0.02, 9: 0.1}, note="set by hand"),
    Case("micro(density=0.05)", settings={4: 0.02, 9: 0.1}, note="set by hand"),
    *(
        Case(text, bad=(3, 9, 10), note="with void steps")
        for text in REGISTERED.values()
        if text not in ("dense", "cast")
    ),
    Case("topk(density=0.05)", bad=(3, 9), options={"protected": True}, note="protected"),
    Case("topk(density=0.05) via D", ranks=4, nodes=2, bad=(3, 9), note="with void steps"),
    Case("topk(density=0.05)", ranks=1, note="alone"),
]

CHECKPOINTS = [
    *(Case(text, ranks=2) for text in REGISTERED.values()),
    Case("topk(density=0.05, momentum=0.5)", ranks=2),
    Case("topk(density=Warmup(0.02, steps=12))", ranks=2),
    Case("topk(density=0.05)", ranks=2, settings={4: 0.02}, note="set by hand"),
    Case("topk(density=0.05)", ranks=2, bad=(2, 4), options={"protected": True}, note="protected"),
    Case("topk(density=0.05)", ranks=2, options={"exclude": ["kernel"]}, note="one excluded"),
    Case("topk(density=0.05)", ranks=2, dtype="bfloat16", note="bfloat16"),
    Case("laplace(density=0.05, momentum=0.5)", ranks=2),
    Case("micro(density=0.05, momentum=0.5)", ranks=2),
    Case("micro(density=0.05, threshold='layer', balance=False)", ranks=3),
    Case("micro(density=Warmup(0.02, steps=12))", ranks=2),
    Case("dgc(density=0.05, momentum=0.5)", ranks=2),
    Case("int8 via J", ranks=2),
    *(
        Case(text, ranks=4, nodes=2)
        for text in (
            "dense via A",
            "topk(density=0.05) via B",
            "topk(density=0.05, momentum=0.5) via D",
            "laplace(density=0.05) via H",
            "sidco(density=0.05) via K",
            "int8 via D",
            f"micro(density=0.05) via {_SUMS}",
            f"lowrank(rank=2) via {_SUMS}",
        )
    ),
]

MEANS = ["topk(density=0.05, momentum=0.5)", "micro(density=0.05)", "lowrank(rank=2)", "topk(density=0.05) via B"]
"""Those of the checkpoints that are also stored in the form "mean", and read by another number of ranks."""
OTHER_RANKS = 3


def chosen_for_mean() -> list[Case]:
    return [case for case in CHECKPOINTS if case.text in MEANS and not case.note]


def run_case(case: Case, exchange: thinwire.Exchange, steps: range, ranks: int = 0) -> dict[str, Any]:
    """What a run is remembered by: a digest of each step; every fifth mean, and the last, where bits are not compared."""
    digests: list[str] = []
    kept: dict[str, Tensor] = {}
    for step, means in zip(steps, case.steps(exchange, steps, ranks), strict=True):
        digests.append("void" if not means else "" if case.tolerance else digest(means))
        if case.tolerance and (step == steps[-1] or step % 5 == 4):
            kept |= {f"{step}.{name}": mean for name, mean in means.items() if mean.numel()}
    return {"digests": digests, "bytes": exchange.stats()["bytes_per_step"], "kept": kept}


# -- local updates -----------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Parameters that begin at stored numbers, and a buffer; gradients are given by hand, or by `forward`."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            if math.prod(shape):
                start = values(f"start {name}", shape, 0, 0).to(getattr(torch, dtype))
                self.register_parameter(name, nn.Parameter(start))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, step: int, rank: int) -> Tensor:
        """A loss whose gradients are the stored numbers, exactly."""
        total = torch.zeros(())
        for name, parameter in self.named_parameters():
            total = total + (parameter * values(name, parameter.shape, step, rank)).sum()
        return total


@dataclass(frozen=True)
class Local:
    """Local updates on a `LocalWorld`. Rates and strengths are powers of two, so that a fused multiply-add rounds as two do."""

    name: str
    codec: str = "randomblock(ratio=8)"
    feedback: Callable[[], Any] = lambda: thinwire.Detached(0.25)
    period: int = 1
    ranks: int = 2
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.125, "momentum": 0.5})
    dtype: str = "float32"
    tolerance: float = 0.0

    @property
    def slug(self) -> str:
        return "local-" + re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")

    def make(self, ranks: int = 0) -> tuple[list[Weights], thinwire.LocalUpdates]:
        models = [Weights(self.dtype) for _ in range(ranks or self.ranks)]
        inner = [self.optimizer(model.parameters(), **self.options) for model in models]
        world = thinwire.LocalWorld(ranks or self.ranks)
        return models, thinwire.LocalUpdates(
            inner, models, self.codec, self.feedback(), self.period, world, min_elements=64
        )

    def steps(
        self, models: Sequence[Weights], opt: thinwire.LocalUpdates, steps: range
    ) -> Iterator[dict[str, Tensor]]:
        """After each step: what every rank computes with, and what they share."""
        for step in steps:
            for rank, model in enumerate(models):
                for name, parameter in model.named_parameters():
                    parameter.grad = values(name, parameter.shape, step, rank).to(parameter.dtype)
                model.seen.add_(values("seen", (3,), step, rank))
            opt.step()
            points = {
                f"{rank}.{name}": parameter.detach().clone()
                for rank, model in enumerate(models)
                for name, parameter in model.named_parameters()
            }
            with opt.at("shared", buffers=False):
                shared = {f"shared.{name}": p.detach().clone() for name, p in models[0].named_parameters()}
            yield points | shared


LOCALS = [
    Local("blocks"),
    Local("blocks three ranks", ranks=3),
    Local("blocks plain feedback", feedback=thinwire.Plain),
    Local("blocks strength 1", feedback=lambda: thinwire.Detached(1)),
    Local("blocks strength auto", feedback=lambda: thinwire.Detached("auto"), tolerance=1e-6),
    Local("blocks period 3", period=3),
    Local("blocks without momentum", options={"lr": 0.125}),
    Local("blocks nesterov and decay", options={"lr": 0.125, "momentum": 0.5, "nesterov": True, "weight_decay": 0.25}),
    Local("blocks bfloat16", dtype="bfloat16"),
    Local("topk", codec="topk(density=0.05)"),
    Local("topk period 2", codec="topk(density=0.05)", period=2),
    Local("topk plain feedback", codec="topk(density=0.05)", feedback=thinwire.Plain),
    Local("micro", codec="micro(density=0.05)"),
    Local("int8", codec="int8"),
    Local("lowrank", codec="lowrank(rank=2)", tolerance=1e-6),
    Local("dense", codec="dense"),
    Local("blocks adam", optimizer=torch.optim.Adam, options={"lr": 0.125}, tolerance=1e-5),
    Local("topk adam", codec="topk(density=0.05)", optimizer=torch.optim.Adam, options={"lr": 0.125}, tolerance=1e-5),
]


def run_local(case: Local, models: Sequence[Weights], opt: thinwire.LocalUpdates, steps: range) -> dict[str, Any]:
    digests: list[str] = []
    kept: dict[str, Tensor] = {}
    for step, now in zip(steps, case.steps(models, opt, steps), strict=True):
        digests.append("" if case.tolerance else digest(now))
        if case.tolerance and (step == steps[-1] or step % 5 == 4):
            kept |= {f"{step}.{name}": value for name, value in now.items() if name.startswith(("0.", "shared."))}
    return {"digests": digests, "bytes": opt.stats()["bytes_per_step"], "kept": kept}


FOLDED = ["blocks", "topk", "blocks adam"]
"""Those of the local updates that are also stored in the form "folded"."""
