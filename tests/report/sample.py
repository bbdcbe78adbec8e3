"""A real job on two ranks that follows a plan, logs and traces: what pages and traces are tested with."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.models import wrapped
from tests.plans import plan_of
from tests.ranks import run
from thinwire.engine import journal
from thinwire.planner.plan import Operation, Plan

STEPS, TRACED = 30, 20

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!-- & 'quoted' [bold]x[/bold] \x1b[2J \u2028"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 16))


def plan() -> Plan:
    """Two groups, with times that somebody might have predicted."""
    shapes = {name: parameter.shape for name, parameter in model().named_parameters()}
    parts = [(["4.weight", "4.bias", "2.weight", "2.bias"], "topk(density=0.01)"), (["0.weight", "0.bias"], "dense")]
    made = plan_of(shapes, parts, 2, each=2)
    operations = [
        (
            Operation("encode", "codec", 0.002, 0.004),
            Operation("all_gather flat", "wire", 0.004, 0.009),
            Operation("decode", "codec", 0.009, 0.010),
        ),
        (
            Operation("encode", "codec", 0.005, 0.006),
            Operation("all_reduce flat", "wire", 0.009, 0.015),
            Operation("decode", "codec", 0.015, 0.016),
        ),
    ]
    groups = tuple(
        msgspec.structs.replace(group, operations=each) for group, each in zip(made.groups, operations, strict=True)
    )
    return msgspec.structs.replace(
        made, groups=groups, predicted_seconds=0.02, dense_seconds=0.05, bound_seconds=0.01, remarks=("made by hand",)
    )


def job(folder: str) -> None:
    ddp = wrapped(model(), bucket_cap_mb=1.0)
    wire = thinwire.attach(ddp, plan())
    wire.log_to(folder, residual_every=5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        if step == STEPS - TRACED:
            wire.trace(TRACED)
        optimizer.zero_grad()
        loss = ddp(torch.randn(64, 256, generator=generator)).square().mean()
        loss.backward()
        wire.note(loss=loss.item())
        optimizer.step()
    wire.close()


def make(folder: Path) -> Path:
    run(2, job, str(folder))
    return folder


def spoil(source: Path, target: Path) -> Path:
    """The same run with a group, a tensor, an event and a note whose names are an attack."""
    target.mkdir()
    for path in journal.files(source):
        with (target / path.name).open("wb") as file:
            for line in journal.Reader(path).read():
                if isinstance(line, journal.Layout):
                    first, *rest = line.groups
                    first = msgspec.structs.replace(
                        first, name=HOSTILE, codec=HOSTILE, tensors=(*first.tensors, HOSTILE)
                    )
                    line = msgspec.structs.replace(line, groups=(first, *rest), codec=HOSTILE)
                file.write(journal.encode(line) + b"\n")
            file.write(journal.encode(journal.Event(STEPS, 0.0, HOSTILE, HOSTILE)) + b"\n")
            file.write(journal.encode(journal.Note(STEPS, 0.0, {HOSTILE: 1.0})) + b"\n")
    return target
