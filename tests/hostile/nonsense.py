"""Nonsense in the place of every number of a file: places are found by walking through a good one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

import thinwire
from tests.hostile import readers
from tests.planner import examples, test_files, test_published
from tests.plans import plan_of
from thinwire.errors import ThinwireError
from thinwire.planner.plan import Plan
from thinwire.planner.profile import Profile

Place = tuple[str | int, ...]

NONSENSE = [
    "-1", "0", "0.5", "-0.5", "1e-320", "1e308", "-1e308", "NaN", "Infinity", "1e400", "true", '"x"', '"5"', "null", "[]", "{}",
    str(2**31), str(2**53 + 1), str(2**63), str(-(2**63) - 1), str(2**64), str(10**30), "9" * 400, "9" * 5000,
]  # fmt: skip
"""As JSON texts, because JSON can say more than Python will print."""
FLOATS = [-1.0, 0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf")]
WHOLES = [-1, 0, 1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)]


@dataclass
class Form:
    """A form of file: good content as a JSON value, and what reads such a text. `read` goes on with what it accepts."""

    name: str
    good: Any
    read: Callable[[str], object]


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """Where numbers are, and bytes that hold some. Of a long list of equals the first and the last."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*at, key))
    elif isinstance(value, list):
        chosen = range(len(value)) if len(value) < 4 or not all(isinstance(v, int | float) for v in value) else (0, -1)
        for index in chosen:
            yield from places(value[index], (*at, index))
    elif (isinstance(value, int | float) and not isinstance(value, bool)) or (at and at[-1] == "data"):
        yield at


def spoilt(good: Any, place: Place) -> list[str]:
    """The texts of `good` with each nonsense in this place."""
    whole = json.loads(json.dumps(good))
    parent = whole
    for key in place[:-1]:
        parent = parent[key]
    if place[-1] == "data":
        return [_with(whole, parent, "data", json.dumps(text)) for text in _arrays(parent)]
    return [_with(whole, parent, place[-1], text) for text in NONSENSE]


def _with(whole: Any, parent: Any, key: str | int, text: str) -> str:
    before, parent[key] = parent[key], "HERE"
    try:
        return json.dumps(whole).replace('"HERE"', text, 1)
    finally:
        parent[key] = before


def _arrays(array: Mapping[str, Any]) -> Iterator[str]:
    """The values of a small array of a codec, with nonsense at one place."""
    kind = np.dtype(array["dtype"])
    good = np.frombuffer(base64.b64decode(array["data"]), kind)
    for at in {0, len(good) // 2, len(good) - 1} if len(good) else ():
        for value in FLOATS if kind.kind == "f" else WHOLES:
            bad = good.copy()
            with np.errstate(over="ignore"):
                bad[at] = value
            yield base64.b64encode(bad.tobytes()).decode()


def names(error: ThinwireError, place: Place) -> bool:
    """Whether the message says where: the field, an index where fields have no names, or the byte if it is no JSON."""
    text = str(error)
    fields = [str(part) for part in place if isinstance(part, str) and part != "data"]
    # Numbers that are legal, but of one rank alone: which of them differ nobody can say from a digest.
    return (
        "malformed" in text
        or "learnt different things" in text
        or any(field in text for field in fields[-2:])
        or f"[{place[-1]}]" in text
    )


# -- forms -------------------------------------------------------------------------------------------------------------


def forms(folder: Path) -> list[Form]:
    fill_from, fill = readers._stream()
    return [
        *(_state(codec) for codec in STATES),
        _state(
            "a plan", plan_of(readers.SHAPES, [(["weight", "bias"], "topk(density=0.1)"), (["other"], "dense")], 2)
        ),
        _state("micro(density=0.1)", form="mean"),
        *_updates(),
        Form(
            "a state on CUDA",
            json.loads(fill_from["rank0.stream"]),
            lambda text: fill({**fill_from, "rank0.stream": text}),
        ),
        Form("a plan file", _plain(test_files.plan()), _file(folder / "plan.json", Plan.load)),
        Form("a profile", _plain(examples.profile()), _file(folder / "profile.json", Profile.load)),
        Form(
            "published profiles",
            {key: test_published.CONTENT[key] for key in ("models", "codec_us")},
            _file(folder / "published.json", readers._look_at_published),
        ),
        *_journal(folder),
        Form("results", json.loads(readers.bench_results()), _file(folder / "results.json", readers.look_at_run)),
    ]


STATES = [
    "micro(density=0.1, threshold='layer')",
    "laplace(density=0.1, momentum=0.5)",
    "sidco(density=0.1)",
    "lowrank(rank=2)",
    "int8 via J",
    "topk(density=Warmup(to=0.1, steps=5))",
]


def _state(codec: Any, plan: Plan | None = None, form: str = "exact") -> Form:
    def job() -> thinwire.Exchange:
        return thinwire.Exchange(readers._tensors(0), plan or codec, thinwire.LocalWorld(2), min_elements=64)

    exchange = job()
    for step in range(4):
        exchange.reduce_([readers._tensors(2 * step), readers._tensors(2 * step + 1)])
    saved = exchange.state_dict(form)  # type: ignore[arg-type]
    key = next(key for key in saved if key.endswith(".thinwire"))
    loads = job()

    def read(text: str) -> None:
        readers._load(loads, {**saved, key: text})

    return Form(f"state of {codec}, {form}", json.loads(saved[key]), read)


def _updates() -> Iterator[Form]:
    for codec, optimizer, period in (
        ("randomblock(ratio=4)", torch.optim.SGD, 1),
        ("micro(density=0.2)", torch.optim.Adam, 3),
    ):

        def job(ranks: int, codec: str = codec, kind: Any = optimizer, period: int = period) -> Any:
            models = [nn.Linear(30, 20) for _ in range(ranks)]
            inner = [kind(model.parameters(), lr=0.1, weight_decay=0.01) for model in models]
            return models, thinwire.LocalUpdates(
                inner, models, codec, period=period, process_group=thinwire.LocalWorld(ranks)
            )

        models, opt = job(2)
        _train(models, opt, 4)
        for form in ("exact", "folded"):
            saved = opt.state_dict(form)
            key = next(key for key in saved if key.endswith(".updates"))
            for ranks in (2, 3):
                held = list(job(ranks))

                def read(text: str, saved: Any = saved, key: str = key, job: Any = job, held: Any = held) -> None:
                    models, opt = held
                    opt.load_state_dict({**saved, key: text})
                    try:
                        _train(models, opt, 1)
                    except ThinwireError:
                        held[:] = job(len(models))  # these have failed for good
                        raise

                yield Form(f"updates of {codec}, {form}, loaded by {ranks}", json.loads(saved[key]), read)


def _train(models: Sequence[nn.Module], opt: thinwire.LocalUpdates, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        for model in models:
            model(torch.ones(2, 30)).sum().backward()
        opt.step()


def _journal(folder: Path) -> Iterator[Form]:
    lines = readers.journal_lines().decode().splitlines()
    read = _file(folder / "run.jsonl", readers.look_at_run)
    seen = set()
    for number, line in enumerate(lines):
        good = json.loads(line)
        if good["kind"] in seen:
            continue
        seen.add(good["kind"])

        def read_line(text: str, number: int = number) -> None:
            read("\n".join([*lines[:number], text, *lines[number + 1 :], ""]))

        yield Form(f"journal, {good['kind']}", good, read_line)


def _plain(content: Any) -> Any:
    return json.loads(msgspec.json.encode(content))


def _file(path: Path, read: Callable[[Path], object]) -> Callable[[str], object]:
    def from_text(text: str) -> object:
        path.write_text(text)
        return read(path)

    return from_text
