"""Compiles what only tests call, before they begin: `python -m tests.kernels.compile`, after `thinwire compile`.

A kernel is compiled for the types of its first call and cached on disk. If that happened inside the tests, each worker
would compile by itself, and the first test of each kernel would take minutes on a busy machine. So every codec takes a
few steps here, with every dtype of its values, local updates do, and plans are searched, on all cores. What only a test
of one kernel calls is compiled there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from thinwire.kernels import cache

PLANS = ["joint", "exact", "espresso", "measured"]
SHAPES = {"matrix": (120, 100), "kernel": (20, 30, 3, 3), "long": (70_001,), "bias": (120,)}
UPDATES = ["randomblock(ratio=8)", "topk(density=0.05)", "micro(density=0.05)", "int8"]
OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
    {"lr": 0.1, "weight_decay": 1e-4},
]


def main() -> None:
    stamp = f"tests {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
    if cache.is_ready(stamp):
        print("kernels of tests: compiled already", flush=True)
        return
    print("compiling kernels of tests: up to two minutes, once per clone ...", flush=True)
    os.environ["THINWIRE_LOG"] = "warning"
    begun = time.monotonic()
    jobs = [("_plan", words) for words in PLANS]
    jobs += [("_exchange", text) for text in _texts()]
    jobs += [("_updates", text) for text in UPDATES]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        for _ in pool.imap_unordered(_do, jobs):
            pass
    cache.mark_ready(stamp)
    print(f"compiling kernels of tests: {time.monotonic() - begun:.0f} s, once per clone", flush=True)


def _do(job: tuple[str, str]) -> None:
    {"_plan": _plan, "_exchange": _exchange, "_updates": _updates}[job[0]](job[1])


def _plan(search: str) -> None:
    from typer.testing import CliRunner

    from tests.planner import examples
    from tests.planner.test_published import CONTENT
    from thinwire.cli.app import app

    with tempfile.TemporaryDirectory() as folder:
        file, out = f"{folder}/profile.json", ["--out", f"{folder}/plan.json"]
        if search == "measured":
            examples.profile(bits_per_second=1e8).save(file)
            words = ["plan", "--profile", file, *out]
        else:
            Path(file).write_text(json.dumps(CONTENT))
            rates = ["--intra", "300gbyte/s", "--inter", "100gbit"]
            words = ["plan", "--model", "small", "--profiles", file, *rates, "--search", search, *out]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output


def _texts() -> list[str]:
    """Every codec, with every dtype of its values; those with kernels of their own first."""
    from thinwire.codecs import CODECS

    texts = [
        "micro(density=0.3, threshold='layer', balance=True)",
        "adacomp(scale='layer')",
        "topk(density=0.3) via B",
    ]
    for name, kind in CODECS.items():
        fields = {field.name for field in dataclasses.fields(kind)}
        texts.append(name)
        if "density" in fields:
            texts.append(f"{name}(density=0.1)")
        if {"density", "values"} <= fields:
            texts += [f"{name}(density=0.1, values={values!r})" for values in ("fp16", "bf16")]
    return [
        *texts,
        "topk(density=0.05) via K",
        "topk(density=0.5)",
        "topk(density=0.001)",
        "sidco(density=0.01)",
        "int8 via J",
    ]


def _exchange(text: str) -> None:
    import torch

    import thinwire

    torch.set_num_threads(1)
    worlds = [thinwire.LocalWorld(4, ranks_per_node=2), *([] if " via " in text else [thinwire.LocalWorld(1)])]
    for world in worlds:
        names = {name: torch.empty(shape) for name, shape in SHAPES.items()}
        exchange = thinwire.Exchange(names, text, world, min_elements=100)
        for _ in range(4):
            exchange.reduce_([{name: torch.randn(shape) for name, shape in SHAPES.items()} for _ in range(world.size)])


def _updates(text: str) -> None:
    import torch
    from torch import nn

    import thinwire

    torch.set_num_threads(1)
    for options in OPTIONS:
        models = [nn.Linear(100, 120) for _ in range(2)]
        inner = [torch.optim.SGD(model.parameters(), **options) for model in models]
        opt = thinwire.LocalUpdates(inner, models, text, process_group=thinwire.LocalWorld(2))
        for _ in range(4):
            for model in models:
                model(torch.randn(8, 100)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        with opt.at("settled"):
            pass


if __name__ == "__main__":
    main()
