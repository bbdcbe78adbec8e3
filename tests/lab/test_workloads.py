"""The models of the lab: their sizes, that they learn, and that everything follows from the seed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from thinwire.lab import LabError
from thinwire.lab.workloads import load

from .conftest import BEGIN

PARAMETERS = {"gpt": 10_859_520, "gpt-ngrams": 1_064_832, "vgg": 8_947_754, "resnet": 1_084_202, "lstm": 8_720_336}


@pytest.mark.parametrize("name", PARAMETERS)
def test_workload(name: str) -> None:
    work = load(name)
    model, same = work.model(), work.model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    for one, other in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, other)
    batch = work.batch(step=1, rank=2)
    assert all(torch.equal(one, other) for one, other in zip(batch, work.batch(1, 2), strict=True))
    assert not torch.equal(batch[0], work.batch(1, 3)[0])
    assert not torch.equal(batch[0], work.batch(2, 2)[0])
    loss = work.loss(model, batch)
    assert loss.shape == ()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As on the lab; more only wait for each other on a machine that does something else besides."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "rate"), [("resnet", 1e-3), ("lstm", 3e-3)])
def test_generated_data_can_be_learned(name: str, rate: float) -> None:
    work = load(name, batch_size=8)
    model = work.model()
    optimizer = torch.optim.Adam(model.parameters(), rate)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        loss = work.loss(model, work.batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_text_from_a_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog " * 50)
    inputs, targets = load(name, data=path, batch_size=2).batch(0)
    assert inputs.shape == targets.shape
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    if name == "gpt":
        assert bytes(inputs[0].tolist()) in path.read_bytes()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no workload 'bert'; known: gpt, gpt-small, gpt-ngrams, vgg, resnet, lstm"):
        load("bert")
    with pytest.raises(LabError, match="reads no file"):
        load("vgg", data="photos")
    with pytest.raises(LabError, match="No such file"):
        load("gpt", data=tmp_path / "missing")
    (tmp_path / "short").write_text("word")
    with pytest.raises(LabError, match="too short"):
        load("lstm", data=tmp_path / "short")


def test_the_lab_loads_neither_torch_nor_typer() -> None:
    script = BEGIN + "import thinwire.lab.cluster\nprint(sorted({'torch', 'typer', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
