"""Everything that reads what others wrote: files, checkpoints, texts. A new reader is one more line in `readers`."""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import thinwire
from tests.hostile import attacks
from tests.planner import examples, test_files, test_published
from thinwire.chains import tree
from thinwire.chains.chain import choose
from thinwire.engine import journal
from thinwire.errors import ExchangeError, StateError, ThinwireError
from thinwire.experimental import stream_state
from thinwire.experimental.stream_state import Meta
from thinwire.lab import bench_step
from thinwire.lab.leftovers import Record
from thinwire.lab.method_spec import parse_updates
from thinwire.lab.netns import parse_rate
from thinwire.planner.network import parse_bytes_per_second
from thinwire.planner.plan import Plan
from thinwire.planner.profile import Profile
from thinwire.planner.published import Published
from thinwire.report import page
from thinwire.report.runs import Run, load
from thinwire.report.terminal import frame
from thinwire.report.trace import chrome

SHAPES = {"weight": (30, 20), "bias": (20,), "other": (700,)}

CODEC_TEXTS = [
    "dense",
    "topk(density=0.01, values='fp16')",
    "topk(density=Warmup(to=0.01, steps=500, start=0.25))",
    "micro(density=0.05, controller='fixed', threshold='layer', balance=True)",
    "adacomp(bin_conv=50, bin_dense=500, factor=2.0, scale='layer')",
    "randomblock(ratio=64.0, seed=3)",
    "lowrank(rank=2)",
    "int8(block=512)",
]


@dataclass
class Reader:
    """Something that reads, good samples, and how to spoil one. `read` raises nothing but errors of thinwire."""

    name: str
    samples: Sequence[Any]
    spoil: Callable[[np.random.Generator, Any], Any]
    read: Callable[[Any], object]


def readers(folder: Path) -> list[Reader]:
    """All of them; `folder` is for files."""
    exchange, state = _exchange()
    updates, point = _updates()
    stream, fill_stream = _stream()
    return [
        Reader("codec text", CODEC_TEXTS, attacks.spoil_text, lambda text: str(thinwire.parse(text))),
        Reader("codec with chain", ["topk(0.1) via B", "int8 via J"], attacks.spoil_text, choose),
        Reader("chain", [*tree.NAMED, *tree.NAMED.values()], attacks.spoil_text, tree.parse),
        Reader("rate", ["100mbit", "2.5gbit", "none"], attacks.spoil_text, parse_rate),
        Reader("method", ["updates(randomblock(ratio=64), 0.3, period=8)"], attacks.spoil_text, parse_updates),
        Reader("bench methods", ["none,fp32@4,topk(density=0.1)"], attacks.spoil_text, _check_methods),
        Reader(
            "record of a cluster", [b'{"nodes": 2, "rate": "1gbit"}'], attacks.spoil_file, _file(folder, Record.read)
        ),
        Reader("text of a state", [state], _text_of("rank0.thinwire"), lambda s: _load(exchange, s)),
        Reader("tensors of a state", [state], _spoil_entries, lambda s: _load(exchange, s)),
        Reader("file of a state", [_saved(exchange, folder)], attacks.spoil_file, _reload(exchange, folder)),
        Reader("plan", [_plan()], attacks.spoil_json_file, _file(folder, Plan.load)),
        Reader("profile", [_profile()], attacks.spoil_json_file, _file(folder, Profile.load)),
        Reader("published profiles", [_published()], attacks.spoil_json_file, _file(folder, _look_at_published)),
        Reader("journal", [journal_lines()], _spoil_lines, _file(folder, look_at_run, "run.jsonl")),
        Reader("results", [bench_results()], attacks.spoil_json_file, _file(folder, look_at_run, "results.json")),
        Reader("rate of a network", ["100gbit", "300gbyte/s"], attacks.spoil_text, parse_bytes_per_second),
        Reader("text of local updates", [point], _text_of("rank0.updates"), updates.load_state_dict),
        Reader("tensors of local updates", [point], _spoil_entries, updates.load_state_dict),
        Reader("text of a state on CUDA", [stream], _text_of("rank0.stream"), fill_stream),
        Reader("tensors of a state on CUDA", [stream], _spoil_entries, fill_stream),
    ]


def storm(folder: Path, seed: int, count: int) -> Counter[tuple[str, str]]:
    """Let every reader in turn read something spoilt, `count` in all; counts outcomes. Others are failures."""
    random = np.random.default_rng(seed)
    everybody = readers(folder)
    outcomes: Counter[tuple[str, str]] = Counter()
    for i in range(count):
        reader = everybody[i % len(everybody)]
        given = reader.spoil(random, attacks.pick(random, list(reader.samples)))
        try:
            reader.read(given)
            outcomes[reader.name, "valid"] += 1
        except ThinwireError as error:
            outcomes[reader.name, type(error).__name__] += 1
            str(error).encode()  # it can be shown
        except Exception as error:
            raise attacks.Escaped(f"{reader.name}: {given!r:.2000} ends in {error!r:.500}", given) from error
    return outcomes


# -- states ------------------------------------------------------------------------------------------------------------


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _exchange() -> tuple[thinwire.Exchange, dict[str, Any]]:
    exchange = thinwire.Exchange(_tensors(0), "micro(density=0.1)", thinwire.LocalWorld(2), min_elements=64)
    for step in range(3):
        exchange.reduce_([_tensors(2 * step), _tensors(2 * step + 1)])
    return exchange, exchange.state_dict()


def _load(exchange: thinwire.Exchange, state: dict[str, Any]) -> None:
    """What was accepted can be gone on with."""
    exchange.load_state_dict(state)
    try:
        exchange.reduce_([_tensors(10), _tensors(11)])
    except ExchangeError as error:
        raise AssertionError(f"accepted, and then: {error}") from error
    except ValueError as error:  # of one rank only; real ranks compare what they have loaded before they go on
        raise StateError(str(error)) from error


def _saved(exchange: thinwire.Exchange, folder: Path) -> bytes:
    exchange.save(folder / "state")
    return (folder / "state" / "rank0-of-2.safetensors").read_bytes()


def _reload(exchange: thinwire.Exchange, folder: Path) -> Callable[[bytes], object]:
    def reload(content: bytes) -> None:
        (folder / "state" / "rank0-of-2.safetensors").write_bytes(content)
        exchange.load(folder / "state")

    return reload


def _updates() -> tuple[thinwire.LocalUpdates, dict[str, Any]]:
    models = [nn.Linear(30, 20), nn.Linear(30, 20)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    updates = thinwire.LocalUpdates(optimizers, models, "randomblock(ratio=4)", process_group=thinwire.LocalWorld(2))
    for model in models:
        model(torch.ones(2, 30)).sum().backward()
    updates.step()
    return updates, updates.state_dict()


def _stream() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    dtypes, partition = dict.fromkeys(SHAPES, "float32"), [["other", "bias"], ["weight"]]
    mine = Meta(stream_state.FORMAT, {"torch": "2"}, "topk", 2, 0, shapes, dtypes, 5, 2, True, partition)

    def fill(state: dict[str, Any]) -> None:
        meta = stream_state.read(state, mine)
        residuals = _tensors(1)
        stream_state.fill({name: residuals[name] for names in meta.partition for name in names}, state, meta)
        assert all(residual.isfinite().all() for residual in residuals.values())

    return stream_state.write(mine, _tensors(0)), fill


def _text_of(key: str) -> Callable[[np.random.Generator, dict[str, Any]], dict[str, Any]]:
    def spoil(random: np.random.Generator, state: dict[str, Any]) -> dict[str, Any]:
        if random.random() < 0.7:
            text: Any = attacks.spoil_json(random, state[key])
        else:
            text = attacks.spoil_file(random, state[key].encode())
            text = text if random.random() < 0.5 else text.decode("latin-1")
        return {**state, key: text}

    return spoil


def _spoil_entries(random: np.random.Generator, state: dict[str, Any]) -> dict[str, Any]:
    """Entries that are missing, renamed, or hold something else."""
    good, state = state, dict(state)
    for key in {attacks.pick(random, list(good)) for _ in range(int(random.integers(1, 3)))}:
        value = state.pop(key)
        kind = int(random.integers(4))
        if kind == 0:
            continue
        if kind == 1:
            state[attacks.spoil_text(random, key)] = value
        elif kind == 2 or not isinstance(value, Tensor):
            state[key] = attacks.pick(random, [*attacks.ODD, b"", np.zeros(3), object()])
        else:
            state[key] = attacks.pick(
                random,
                [
                    value.double(),
                    value.half(),
                    value.reshape(-1)[:-1],
                    value[None],
                    torch.full_like(value, float("nan")),
                    value.to("meta"),
                    value.to_sparse() if value.dim() else value,
                    value.to(torch.complex64),
                    _quantized(value),
                    value.int(),
                    value.t() if value.dim() == 2 else value.flip(0) if value.dim() else value,
                ],
            )
    return state


def _quantized(value: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give them up
        return torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8)


# -- the rest ----------------------------------------------------------------------------------------------------------


def journal_lines() -> bytes:
    """One line of each kind, and steps enough for a page."""
    groups = (
        journal.GroupLine("group 0", "topk(density=0.01)", "", 1000, ("a", "b"), "float32", 80.0),
        journal.GroupLine("group 1", "dense", "", 10, ("c",), "float32", 40.0),
    )
    each = (journal.GroupStep(0.001, 0.002, 0.001, 80, 10), journal.GroupStep(0.0, 0.001, 0.0, 40, 0))
    spans = (
        journal.Span("job", "backward", -1, 0.001, 0.01),
        journal.Span("thread", "encode", 0, 0.004, 0.005),
        journal.Span("wire", "all-gather", 0, 0.005, 0.009),
    )
    arrivals = (journal.Arrival(0.004, 2, "a", (0,)), journal.Arrival(0.009, 1, "c", (1,)))
    lines: list[journal.Line] = [
        journal.Start(journal.VERSION, 1.5e9, 0, 2, "topk(density=0.01)", "0.1", "2", "host", 1),
        journal.Layout(1, 1.5e9, "topk(density=0.01)", groups, test_files.plan()),
        *(
            journal.Step(
                n, 1.5e9 + n, 0.02, 0.015, 0.005, 0.001, 0.003, 0.001, 120, 0.01, 0.01, 3.5, n == 4, groups=each
            )
            for n in range(2, 9)
        ),
        journal.Event(4, 1.5e9, "skipped", "not finite"),
        journal.Note(5, 1.5e9, {"loss": 2.5}),
        journal.Fit(
            6,
            1.5e9,
            "group 0",
            0.1,
            0.5,
            (0.1, 0.2, 0.4),
            (0.4, 0.6),
            (journal.FittedModel("gauss", 0.1, (0.5, 0.5)),),
        ),
        journal.Trace(6, 1.5e9, 0.02, spans, arrivals, "layout", 7.5),
    ]
    return b"".join(journal.encode(line) + b"\n" for line in lines)


def bench_results() -> bytes:
    rows = [{"method": "topk", "rate": "1gbit", "seconds": 0.25, "density": 0.01}]
    return json.dumps({"command": "bench step", "rows": rows, "machine": {"cores": 2}}).encode()


def look_at_run(path: Path) -> None:
    """What was accepted can be shown: as a page, as a trace, in a terminal."""
    found = load(path)
    page.page([found])
    if isinstance(found, Run):
        json.dumps(chrome(found), allow_nan=False)
        Console(file=io.StringIO()).print(frame(found, 12))


def _spoil_lines(random: np.random.Generator, content: bytes) -> bytes:
    lines = content.splitlines()
    at = int(random.integers(len(lines)))
    lines[at] = attacks.spoil_json_file(random, lines[at]).replace(b"\n", b" ")
    return b"\n".join(lines) + b"\n"


def _profile() -> bytes:
    return msgspec.json.encode(examples.profile())


def _plan() -> bytes:
    return msgspec.json.encode(test_files.plan())


def _published() -> bytes:
    return json.dumps(test_published.CONTENT).encode()


def _look_at_published(path: Path) -> None:
    published = Published.load(path)
    for name in ("small", "one"):
        published.model(name)
    for name in ("dgc", "random_k", "fp16", "efsignsgd"):
        published.codec(name)


def _check_methods(text: str) -> None:
    bench_step.check(bench_step.Options(workload="gpt-small", methods=tuple(bench_step.split(text))))


def _file(folder: Path, read: Callable[[Path], object], name: str = "tw1.2.3") -> Callable[[bytes], object]:
    """A reader of paths, given content."""

    def from_content(content: bytes) -> object:
        path = folder / name
        path.write_bytes(content)
        return read(path)

    return from_content
