"""Writes the golden files: `python -m tests.golden.make`, from the root of the repository.

Files that exist are left alone, because files that were written once must stay readable for good; what is new in `cases.py` is
added. `--overwrite PART...` writes parts anew: trajectories for a change of numerics, in a commit of its own that says why;
surface for what was added to it. Checkpoints and files of older versions are never overwritten, new forms get new cases.

    inputs         stored integers that all gradients are made of
    trajectories   20 steps of every codec, its variants and chains, and of local updates
    checkpoints    states of every form, and what the five steps after them gave
    ranks          the same of real ranks: DDP, with a plan, a scaler, auto, on the GPU's path; a journal
    resumed        what the steps after stored states give, where numerics changed since
    messages       bytes of every coding, and of every codec that gathers messages
    files          a plan, a profile, what `auto` keeps for the next run, lines of a journal
    surface        names, signatures, commands, options, columns
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import thinwire
from tests.ranks import run

from . import cases, frozen, internals, jobs
from .cases import AFTER, BEFORE, CHECKPOINTS, FILES, LOCALS, OTHER_RANKS, STEPS, TRAJECTORIES, chosen_for_mean

NUMBERS = 20_011


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def merge(name: str, found: dict[str, dict[str, Any]], overwrite: bool) -> None:
    """Add records and the tensors that they keep to what is there."""
    records_file, tensors_file = FILES / f"{name}.json", FILES / f"{name}.safetensors"
    records = {} if overwrite or not records_file.exists() else json.loads(records_file.read_text())
    tensors = {} if overwrite or not tensors_file.exists() else load_file(tensors_file)
    for key, record in found.items():
        kept = record.pop("kept")
        records[key] = record
        tensors |= {f"{key}|{place}": tensor.contiguous() for place, tensor in kept.items()}
    write_json(records_file, records)
    save_file(tensors, tensors_file)


def known(name: str, overwrite: bool) -> set[str]:
    path = FILES / f"{name}.json"
    return set() if overwrite or not path.exists() else set(json.loads(path.read_text()))


def inputs(overwrite: bool) -> None:
    path = FILES / "inputs.npz"
    if path.exists():
        if overwrite:
            raise SystemExit("inputs are never written anew: every other file follows from them")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    dice = np.random.Generator(np.random.PCG64(20))
    mantissa = dice.integers(-(2**15) + 1, 2**15, NUMBERS, dtype=np.int16)
    exponent = (-15 - np.minimum(dice.geometric(0.4, NUMBERS), 12)).astype(np.int8)
    np.savez_compressed(path, mantissa=mantissa, exponent=exponent)


def trajectories(overwrite: bool) -> None:
    before, found = known("trajectories", overwrite), {}
    for case in TRAJECTORIES:
        if f"{case.name} {case.shapes}" not in before:
            found[f"{case.name} {case.shapes}"] = cases.run_case(case, case.exchange(), range(STEPS))
    for local in LOCALS:
        if local.slug not in before:
            found[local.slug] = cases.run_local(local, *local.make(), range(STEPS))
    merge("trajectories", found, overwrite)


def checkpoints(overwrite: bool) -> None:
    before, found = known("checkpoints", overwrite), {}
    for case in CHECKPOINTS:
        if case.slug in before:
            continue
        exchange = case.exchange()
        for _ in case.steps(exchange, range(BEFORE)):
            pass
        folder = FILES / "checkpoints" / case.slug
        exchange.save(folder)
        if case in chosen_for_mean():
            exchange.save(folder / "mean", form="mean")
            other = case.exchange(OTHER_RANKS) if case.nodes == 1 else case.exchange()
            other.load(folder / "mean")
            ranks = OTHER_RANKS if case.nodes == 1 else 0
            found[f"{case.slug} mean"] = cases.run_case(case, other, range(BEFORE, BEFORE + AFTER), ranks)
        found[case.slug] = cases.run_case(case, exchange, range(BEFORE, BEFORE + AFTER))
    for local in LOCALS:
        if local.slug in before:
            continue
        models, opt = local.make()
        for _ in local.steps(models, opt, range(BEFORE + 1)):  # in the middle of a period, where there is one
            pass
        folder = FILES / "checkpoints" / local.slug
        opt.save(folder)
        after = range(BEFORE + 1, BEFORE + 1 + AFTER)
        if local.period == 1 and local.name in cases.FOLDED:
            opt.save(folder / "folded", kind="folded")
            others, other = local.make(OTHER_RANKS)
            other.load(folder / "folded")
            found[f"{local.slug} folded"] = cases.run_local(local, others, other, after)
        found[local.slug] = cases.run_local(local, models, opt, after)
    merge("checkpoints", found, overwrite)


def resumed(overwrite: bool) -> None:
    """What the steps after a checkpoint give, where numerics changed since it was written."""
    if not overwrite:
        return
    found: dict[str, dict[str, Any]] = {}
    after = range(BEFORE, BEFORE + AFTER)
    for case in CHECKPOINTS:
        folder = FILES / "checkpoints" / case.slug
        if cases.changed(case.text):
            exchange = case.exchange()
            exchange.load(folder)
            found[case.slug] = cases.run_case(case, exchange, after)
        if cases.changed(case.text) and case in chosen_for_mean():
            ranks = OTHER_RANKS if case.nodes == 1 else 0
            other = case.exchange(ranks)
            other.load(folder / "mean")
            found[f"{case.slug} mean"] = cases.run_case(case, other, after, ranks)
    for local in LOCALS:
        if cases.changed(local.codec):
            models, opt = local.make()
            opt.load(FILES / "checkpoints" / local.slug)
            found[local.slug] = cases.run_local(local, models, opt, range(BEFORE + 1, BEFORE + 1 + AFTER))
    merge("checkpoints", found, overwrite=False)
    digests = json.loads((FILES / "ranks.json").read_text())
    for kind in filter(jobs.changed, jobs.KINDS):
        (_, digests[kind]), _ = run(2, jobs.resume, kind, str(FILES / "ranks" / kind), False)
    write_json(FILES / "ranks.json", digests)


def ranks(overwrite: bool) -> None:
    from tests.plans import plan_of

    folder = FILES / "ranks"
    if (FILES / "ranks.json").exists() and not overwrite:
        return
    shapes = {name: shape for name, shape in cases.SHAPES.items() if math.prod(shape)}
    parts = [
        (["wide", "bias", "scalar"], "topk(density=0.05)"),
        (["kernel"], "dense"),
        (["matrix"], "micro(density=0.05)"),
    ]
    plan = plan_of(shapes, parts, 2, each=2)
    folder.mkdir(parents=True, exist_ok=True)
    msgspec.structs.replace(plan, quality="high", dense_seconds=1e9).save(jobs.PLAN)
    found = {}
    for kind in jobs.KINDS:
        found[kind], other = run(2, jobs.write, kind, str(folder / kind))
        assert found[kind] == other, "all ranks have the same means"
    write_json(FILES / "ranks.json", found)
    run(2, jobs.log, str(FILES / "journal"))
    for path in (FILES / "journal").iterdir():
        path.write_text(path.read_text().replace(json.dumps(platform.node()), '"somewhere"'))


def messages(overwrite: bool) -> None:
    if overwrite or not (FILES / "messages.json").exists():
        write_json(FILES / "messages.json", {"packed": frozen.messages(), "codecs": frozen.codec_messages()})


def files(overwrite: bool) -> None:
    """A profile with every field, the plan that follows from it, where `auto` keeps both, and every kind of line."""
    from tests.planner import examples

    if (FILES / "profile.json").exists() and not overwrite:
        return
    base = examples.profile()
    points = ((64.0, 0.001), (1e6, 0.011))
    energy = [msgspec.structs.replace(tensor, energy=0.5 + i) for i, tensor in enumerate(base.tensors)]
    profile = msgspec.structs.replace(
        base,
        links=(msgspec.structs.replace(base.links[0], points=points), *base.links[1:]),
        tensors=tuple(energy),
        native_seconds=0.25,
        fit=1.25,
        remarks=("made by hand",),
    )
    profile.save(FILES / "profile.json")
    profile = internals.Profile.load(FILES / "profile.json")
    profile.save(FILES / "profile.json")  # with whole numbers as a reader has them
    with tempfile.TemporaryDirectory() as folder:
        words = ["plan", "--profile", str(FILES / "profile.json"), "--out", str(FILES / "plan.json")]
        frozen.call(words, Path(folder))
    tensors = [internals.TensorInfo(t.name, t.shape, t.dtype, t.kind) for t in profile.tensors]
    places = {
        quality: str(internals.kept.place(tensors, profile.cluster, quality).relative_to(frozen.cache()))
        for quality in ("lossless", "high", "fast")
    }
    write_json(FILES / "cache.json", {"places": places, "profile": "mine.profile.json"})
    internals.kept.save(FILES / "cache" / "mine.json", thinwire.Plan.load(FILES / "plan.json"), profile)
    journal = internals.journal
    lines = [
        journal.Start(1, 1.5, 0, 2, "auto", "1.0", "2.0", "somewhere", 2),
        journal.Layout(
            2,
            2.5,
            "plan: dense",
            (journal.GroupLine("group 0", "topk", "B", 10, ("a", "b"), "float32", 12.5),),
            thinwire.Plan.load(FILES / "plan.json"),
        ),
        journal.Step(3, 3.5, groups=()),
        journal.Step(
            4,
            4.5,
            0.5,
            0.25,
            0.25,
            0.125,
            0.0625,
            0.03125,
            100,
            0.5,
            0.25,
            1.5,
            True,
            "dense",
            (journal.GroupStep(0.5, 0.25, 0.125, 7, 8),),
        ),
        *(
            journal.Event(5, 5.5, what, "words")
            for what in ("skipped", "settings", "codec", "auto", "fallback", "closed")
        ),
        journal.Note(6, 6.5, {"loss": 1.25, "unknown": None}),
        journal.Trace(
            7,
            7.5,
            0.5,
            (journal.Span("job", "forward", -1, 0.0, 0.25), journal.Span("wire", "all-gather", 0, 0.25, 0.5)),
            (journal.Arrival(0.125, 2, "a", (0,)),),
            "layout",
            8.5,
        ),
    ]
    (FILES / "lines.jsonl").write_bytes(b"".join(journal.encode(line) + b"\n" for line in lines))


def surface(overwrite: bool) -> None:
    if (FILES / "surface.json").exists() and not overwrite:
        return
    write_json(FILES / "surface.json", frozen.surface())
    write_json(FILES / "imports.json", frozen.imports())
    write_json(FILES / "lines.json", frozen.lines_of(internals.journal.Line))
    with tempfile.TemporaryDirectory() as folder:
        write_json(FILES / "columns.json", frozen.columns(Path(folder)))
        write_json(FILES / "reported.json", frozen.reported(Path(folder)))


PARTS: dict[str, Callable[[bool], None]] = {
    "inputs": inputs,
    "trajectories": trajectories,
    "checkpoints": checkpoints,
    "ranks": ranks,
    "resumed": resumed,
    "messages": messages,
    "files": files,
    "surface": surface,
}


AGAIN = ["trajectories", "resumed", "messages", "surface"]
"""What may be written anew; the rest is files that somebody may have."""


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m tests.golden.make", description=(__doc__ or "").split("\n")[0])
    words.add_argument("--overwrite", nargs="+", choices=AGAIN, default=[], metavar="PART", help="write these anew")
    given = words.parse_args()
    torch.set_num_threads(1)
    for name, write in PARTS.items():
        write(name in given.overwrite)
        print(name, file=sys.stderr)


if __name__ == "__main__":
    main()
