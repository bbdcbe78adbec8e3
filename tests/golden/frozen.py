"""Records that are plain JSON: bytes of messages, the public surface. `make.py` stores what these give, tests compare."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer.main
from typer.testing import CliRunner

import thinwire

from . import cases, internals
from .cases import FILES, REGISTERED

ROOT = Path(__file__).parents[2]

# -- messages ----------------------------------------------------------------------------------------------------------


def _packed(elements: int, indices: Any, coding: str, **more: Any) -> dict[str, Any]:
    """One message: what went in, and its bytes."""
    kind = internals.messages.ValueCoding[coding]
    places = np.asarray(indices, np.int32)
    given = None if coding == "NONE" else more.get("values", [0.5 * (-1) ** i * (i + 1) for i in range(places.size)])
    numbers = None if given is None else np.asarray(given, np.float32)
    capacity = more.get("capacity", 16 + 4 * places.size + internals.messages.bound(elements, places.size, kind))
    buffer = np.zeros(capacity, np.uint8)
    options = {name: more[name] for name in ("rotation", "finite") if name in more}
    packed = internals.messages.pack(places, numbers, elements, buffer, kind, **options)
    header = internals.messages.read_header(buffer)
    return {
        "elements": elements,
        "coding": coding,
        "entries": packed.entries,
        "wanted": packed.wanted,
        "index": header.index.name,
        "flags": int(header.flags),
        "hex": buffer[: packed.size].tobytes().hex(),
    }


def _arrived(record: dict[str, Any]) -> dict[str, list[float]]:
    """What a message says, read from its bytes alone."""
    buffer = np.frombuffer(bytes.fromhex(record["hex"]), np.uint8).copy()
    indices, values = np.zeros(record["elements"] + 1, np.int32), np.zeros(record["elements"] + 1, np.float32)
    if record["coding"] == "NONE":
        header = internals.messages.read_header(buffer)
        internals.messages.decode_indices(buffer, record["elements"], indices[: header.entries])
        return {"indices": indices[: header.entries].tolist()}
    header = internals.messages.unpack(buffer, record["elements"], indices, values)
    return {"indices": indices[: header.entries].tolist(), "values": values[: header.entries].tolist()}


def messages() -> list[dict[str, Any]]:
    """Every index coding with every value coding, empty and full, cut and not finite."""
    many = [3, 100, 101, 350, 351, 352, 353, 420, 500, 700, 901, 999]
    found = []
    for coding in ("NONE", "FP32", "FP16", "BF16"):
        found += [
            _packed(1000, [], coding),
            _packed(0, [], coding),
            _packed(1, [0], coding),
            _packed(5, range(5), coding),  # all
            _packed(20, [0, 1, 2, 5, 6, 9, 10, 11, 14, 17, 19], coding),  # a bitmap
            _packed(1 << 20, [1_000_000], coding),  # one of 32 bits
            _packed(1000, many, coding),  # Rice
            _packed(1000, [4, 5, 6, 7, 8, 9, 10, 900], coding),  # with an escape
            _packed(1000, many, coding, capacity=40, rotation=1),
            _packed(1000, many, coding, capacity=40, rotation=2),
            _packed(1000, many, coding, capacity=16, rotation=3),
            _packed(1000, many, coding, finite=False),
        ]
        if coding != "NONE":
            found.append(_packed(1000, [1, 2, 3, 4], coding, values=[1e5, -1e38, 1e-9, 65520.0]))
    return [record | {"arrives": _arrived(record)} for record in found]


def codec_messages() -> dict[str, list[dict[str, Any]]]:
    """The messages of every codec that gathers, step by step: whole, cut short, and not finite."""
    found: dict[str, list[dict[str, Any]]] = {}
    texts = [*REGISTERED.values(), "topk(density=0.05, values='fp16')", "topk(density=0.05, values='bf16')"]
    parameters = (
        internals.ParameterInfo("matrix", 0, 480, (24, 20), "dense"),
        internals.ParameterInfo("kernel", 500, 144, (4, 4, 3, 3), "conv"),
    )
    for text in texts:
        codec = thinwire.parse(text)
        if not isinstance(codec, internals.GatheredCodec):
            continue
        group = internals.GroupInfo("group 0", 700, parameters)
        state, residual, records = codec.start(group, 1, 3), torch.zeros(700), []
        for step in range(6):
            gradient = torch.zeros(700)
            for parameter in parameters:
                inside = slice(parameter.offset, parameter.offset + parameter.elements)
                gradient[inside] = cases.values(parameter.name, (parameter.elements,), step, 1)
            if step == 4:
                gradient[7] = float("nan")
            state.step = step
            capacity = max(100, codec.smallest_capacity(group)) if step == 3 else 8192
            state.outgoing = torch.zeros(capacity, dtype=torch.uint8)
            size = codec.at(step).encode(gradient, residual, state).size
            message, out = state.outgoing[:size].clone(), torch.zeros(700)
            if step == 4:
                codec.at(step).undo(residual, state)
            else:
                codec.at(step).decode([message], out, 1.0, state)
                codec.commit([state])
            sums = {"arrives": cases.digest({"": out}), "residual": cases.digest({"": residual})}
            records.append({"hex": message.numpy().tobytes().hex(), **sums})
        found[text] = records
    return found


# -- the public surface ------------------------------------------------------------------------------------------------


def _signature(what: Any) -> list[str]:
    """Names, kinds and defaults of parameters; annotations are for readers."""
    found: list[str] = []
    try:
        parameters = inspect.signature(what).parameters
    except ValueError:  # an exception's
        return found
    for parameter in parameters.values():
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        only = "keyword " if parameter.kind is parameter.KEYWORD_ONLY else ""
        found.append(f"{only}{star}{parameter.name}{default}")
    return found


def _members(kind: type) -> dict[str, Any]:
    """The public methods and properties of a class that thinwire wrote, inherited ones included."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("thinwire")]
    found: dict[str, Any] = {}
    for name in sorted({name for base in own for name in vars(base) if not name.startswith("_")}):
        member = inspect.getattr_static(kind, name)
        plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        found[name] = _signature(plain) if inspect.isfunction(plain) else "value"
    return found


METHODS = {
    "Wire": "change close error load load_state_dict log_to note plan save scaled_by set skipped_last_step state_dict stats "
    "stats_of_all_ranks steps trace guard",
    "Exchange": "change close load load_state_dict log_to note plan reduce_ save set skipped_last_step state_dict stats begin "
    "end stats_of_all_ranks steps trace",
    "LocalUpdates": "add_param_group at load load_state_dict param_groups save state state_dict stats step strength "
    "zero_grad",
    "Plan": "check load save validate",
    "Codec": "adjusted adjustable at commit direct estimate exchange keeps_residual rides rounds sent smallest_capacity start "
    "undo",
}
"""What users of these classes are promised; the rest of their members is the engine's."""


def api() -> dict[str, Any]:
    """`thinwire.__all__`: signatures, and the members that users have."""
    found: dict[str, Any] = {}
    for name in sorted(thinwire.__all__):
        what = getattr(thinwire, name)
        if inspect.isclass(what):
            members = _members(what)
            promised = METHODS.get(name, "").split()
            call_ = [] if name == "Wire" else _signature(what)  # `attach` makes it, not the user
            found[name] = {"call": call_, "members": {key: members.get(key) for key in promised}}
        elif callable(what):
            found[name] = {"call": _signature(what)}
        else:
            found[name] = type(what).__name__
    return found


def codecs() -> dict[str, dict[str, Any]]:
    """Names of codecs in texts, with their parameters and defaults, and how a text comes back."""
    own = {name: kind for name, kind in internals.CODECS.items() if kind.__module__.startswith("thinwire.")}
    found: dict[str, dict[str, Any]] = {}
    for name, kind in own.items():
        given = {field.name: None if field.default is MISSING else field.default for field in fields(kind)}
        text = REGISTERED[name]
        found[name] = {"class": kind.__name__, "defaults": given, "text": str(thinwire.parse(text))}
        found[name]["adjustable"] = list(kind.adjustable)
    return found


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        default = (
            parameter.default
            if isinstance(parameter.default, str | int | float | bool | None)
            else str(parameter.default)
        )
        kind = "argument" if "Argument" in type(parameter).__name__ else "option"
        more = [word for word in ("required", "multiple", "is_flag", "hidden") if getattr(parameter, word, False)]
        yield f"{kind} {' '.join(names)} = {default!r} {' '.join(more)}".rstrip()


def commands() -> dict[str, list[str]]:
    """Every command with its options and arguments, and their defaults."""
    found: dict[str, list[str]] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        found[" ".join(words)] = list(_options(command))
        for name, child in sorted(getattr(command, "commands", {}).items()):
            walk(child, (*words, name))

    walk(typer.main.get_command(internals.app), ("thinwire",))
    return found


def environment() -> list[str]:
    """The variables that thinwire reads, and those of others that it heeds."""
    texts = [path.read_text() for path in sorted((ROOT / "src").rglob("*.py"))]
    found = {name for text in texts for name in re.findall(r"_?THINWIRE_[A-Z_]*[A-Z]", text)}
    return sorted(found | {name for text in texts for name in re.findall(r"XDG_[A-Z_]+|NO_COLOR", text)})


# -- what pages name ---------------------------------------------------------------------------------------------------


def _pages() -> Iterator[tuple[Path, str]]:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]:
        yield path, path.read_text()


def imports() -> list[str]:
    """Every import path, `MODULE` or `MODULE:NAME`, and every module for `python -m`, that README, docs or examples name."""
    found: set[str] = set()
    for path, text in _pages():
        found |= set(re.findall(r"\bthinwire(?:\.[A-Za-z_][A-Za-z_0-9]*)+", text))
        found |= {f"-m {name}" for name in re.findall(r"-m (thinwire(?:\.[a-z_]+)*|tests\.[a-z_.]*[a-z])\b", text)}
        blocks = [text] if path.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        for block in blocks:
            try:
                tree = ast.parse(block)
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "thinwire":
                    found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return sorted(found - {"thinwire.md"})


def surface() -> dict[str, Any]:
    return {"api": api(), "codecs": codecs(), "commands": commands(), "environment": environment()}


def stored(name: str) -> Any:
    return json.loads((FILES / f"{name}.json").read_text())


# -- how a journal looks -----------------------------------------------------------------------------------------------


def shape_of(value: Any) -> Any:
    """The fields of a line and their types, without numbers: whole and broken ones are alike, and a list is its first item."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def lines_of(kind: Any) -> dict[str, list[str]]:
    """The classes of lines in a journal, by their tag, with their fields in order; and those inside of them."""
    found: dict[str, list[str]] = {}

    def visit(what: Any) -> None:
        for part in typing.get_args(what):
            visit(part)
        if inspect.isclass(what) and hasattr(what, "__struct_fields__"):
            config = what.__struct_config__
            word = f"{config.tag_field}={config.tag}" if config.tag else "array" if config.array_like else "object"
            key = f"{word} {'' if config.tag else ' '.join(what.__struct_fields__)}".strip()
            if key not in found:
                found[key] = list(what.__struct_fields__)
                for hint in typing.get_type_hints(what).values():
                    visit(hint)

    visit(kind)
    return found


def cache() -> Path:
    """The folder that thinwire keeps things in is in this one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


# -- what commands write -----------------------------------------------------------------------------------------------


def call(words: list[str], folder: Path) -> dict[str, Any]:
    """The result file of a command."""
    target = folder / "result.json"
    done = CliRunner().invoke(internals.app, [*words, "--json", str(target)])
    assert done.exit_code == 0, done.output
    content: dict[str, Any] = json.loads(target.read_text())
    return content


def reported(folder: Path) -> dict[str, Any]:
    """What `report` and `top` say of the stored journal, and the trace they make of it."""
    run = str(FILES / "journal")
    page = ["report", run, "--out", str(folder / "page.html")]
    call(["report", run, "--trace", str(folder / "trace.json")], folder)
    return {
        "report": call(page, folder)["rows"],
        "top": call(["top", run, "--once"], folder)["rows"],
        "trace": json.loads((folder / "trace.json").read_text()),
    }


def columns(folder: Path) -> dict[str, Any]:
    """Columns of the rows and keys of the summary that commands write with `--json`, of those that run in a moment.

    And the keys of `stats()`.
    """
    profile = str(FILES / "profile.json")
    run = str(FILES / "journal")
    found: dict[str, Any] = {}
    for words in (
        ["plan", "--profile", profile, "--out", str(folder / "plan.json")],
        ["simulate", "--profile", profile, "--nodes", "2..4", "--inter", "1gbit"],
        ["report", run, "--out", str(folder / "page.html")],
        ["top", run, "--once"],
        ["doctor"],
    ):
        content = call(words, folder)
        name = content["command"]
        found[name] = {"file": list(content), "rows": list(content["rows"][0]), "summary": list(content["summary"])}
    rows, summary = internals.columns_of_profile(internals.Profile.load(profile))
    found["profile"] = {"rows": [list(rows[0]), list(rows[-1])], "summary": list(summary)}
    found["lab run"] = {"rows": list(internals.columns_of_lab_run()[0])}
    exchange = cases.Case("topk(density=0.05)").exchange()
    exchange.reduce_([cases.gradients(cases.SHAPES, 0, rank) for rank in range(3)])
    stats = exchange.stats()
    found["Exchange.stats"] = {"keys": list(stats), "groups": list(stats["groups"][0])}
    _, opt = cases.LOCALS[0].make()
    found["LocalUpdates.stats"] = {"keys": list(opt.stats())}
    return found
