"""The demo's job: its recipe, how many steps it takes, and what it reports, on a cluster with and without namespaces."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from thinwire.cli.app import app
from thinwire.engine import journal
from thinwire.lab import Cluster
from thinwire.lab.demo import Outcome, train
from thinwire.lab.demo_setup import LEARNING_RATE, WORKLOAD, Setup, shipped_text
from thinwire.lab.train import FEWEST, MOMENTUM, rate_at, steps_within
from thinwire.lab.workloads import load
from thinwire.report.runs import Run
from thinwire.report.runs import load as load_run

from .conftest import any_mode, needs_namespaces

STEPS = 12


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [rate_at(step, 240) for step in range(240)]
    peak = rates.index(max(rates))
    assert max(rates) == LEARNING_RATE
    assert 0 < rates[0] < 0.05 * LEARNING_RATE
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < 0.001 * LEARNING_RATE
    assert all(rate_at(step, 1) > 0 for step in range(1)), "however short"


def test_as_many_steps_as_two_runs_have_time_for() -> None:
    assert steps_within(105.0, 0.37, 0.03) == 250
    assert steps_within(105.0, 0.74, 0.06) == 125
    assert steps_within(15.0, 10.0, 0.05) == FEWEST


def test_the_loss_falls_smoothly() -> None:
    """No jump in the warm-up, where the rate is highest for what the model knows yet."""
    torch.manual_seed(0)
    work, steps = load(WORKLOAD, data=shipped_text(), batch_size=8), 60
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM, nesterov=True)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate_at(step, steps)
        loss = work.loss(model, work.batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    means = [statistics.fmean(losses[at : at + 10]) for at in range(0, steps, 10)]
    assert all(after < before + 0.05 for before, after in pairwise(means)), means  # batches differ
    assert max(losses) < losses[0] + 0.5
    assert means[-1] < 2.0


def test_the_text_ships_with_python() -> None:
    text = shipped_text().read_text()
    assert len(text) > 100_000
    assert "statement" in text


@needs_namespaces
def test_both_runs_on_emulated_links(tmp_path: Path) -> None:
    setup, news = Setup(steps=STEPS), []
    with Cluster(2, rate="1gbit", mode=any_mode()) as cluster:
        plain = train(cluster, "fp32", setup, lambda outcome: news.append(len(outcome.ends)))
        ours = train(cluster, "micro(density=0.01)", setup, lambda _: None, log=tmp_path / "ours")
    assert news == list(range(STEPS + 1)), "once when the number of steps is known, then after each"
    for outcome in (plain, ours):
        assert len(outcome.ends) == len(outcome.losses) == len(outcome.sent) == len(outcome.paths) == STEPS
        assert outcome.ends == sorted(outcome.ends)
        assert outcome.steps == STEPS
        assert outcome.bytes_sent is not None
    assert plain.losses[0] == pytest.approx(ours.losses[0], abs=1e-4), "the same weights and batches"
    assert plain.paths == ["ddp"] * STEPS
    assert ours.paths[-1] == "layout"
    assert ours.compressed
    assert not plain.compressed
    elements = sum(parameter.numel() for parameter in load(WORKLOAD).model().parameters())
    assert plain.bytes_sent is not None
    assert plain.bytes_sent / STEPS == pytest.approx(4 * elements, rel=0.15)
    assert ours.bytes_sent is not None
    assert ours.bytes_sent < 0.5 * plain.bytes_sent


def test_a_job_over_loopback_does_not_say_what_a_node_sends() -> None:
    with Cluster(2, rate="100mbit", mode="loopback") as cluster:
        outcome = train(cluster, "fp32", Setup(steps=10), lambda _: None)
    assert outcome.bytes_sent is None
    assert len(outcome.losses) == 10


@needs_namespaces
def test_the_command(tmp_path: Path) -> None:
    """As somebody types it: what is printed, the page, the results."""
    page, results = tmp_path / "report.html", tmp_path / "demo.json"
    words = ["--rate", "1gbit", "--steps", "10", "--codec", "micro(density=0.01)"]
    done = CliRunner().invoke(app, ["demo", *words, "--report", str(page), "--json", str(results)])
    assert done.exit_code == 0, done.output
    found = json.loads(results.read_text())
    said = " ".join(done.stdout.split())
    assert found["summary"]["totals"] in said
    assert found["summary"]["verdict"] in said
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert found["command"] == 'thinwire demo --codec "micro(density=0.01)" --rate 1gbit --steps 10'
    assert [row["steps"] for row in found["rows"]] == [10, 10]
    assert found["summary"]["longest_pause_seconds"] == found["rows"][1]["longest_pause_seconds"] > 0
    assert found["summary"]["headline"] in page.read_text()


def test_the_journal_of_a_plain_run(tmp_path: Path) -> None:
    outcome = Outcome("fp32", 1000.0, 3, [0.5, 0.9, 1.4], [3.0, 2.0, 1.0], ["ddp"] * 3, [10, 20, 33])
    outcome.write_journal(tmp_path / "plain.jsonl", 4)
    run = load_run(tmp_path / "plain.jsonl")
    assert isinstance(run, Run)
    assert run.first.start.world == 4
    assert [step.time for step in run.first.steps] == [1000.5, 1000.9, 1001.4]
    assert [step.link_bytes for step in run.first.steps] == [11.0, 11.0, 11.0]
    assert [note.values["loss"] for note in run.first.notes] == [3.0, 2.0, 1.0]
    assert outcome.seconds == pytest.approx([0.5, 0.4, 0.5])
    assert json.loads((tmp_path / "plain.jsonl").read_text().splitlines()[0])["version"] == journal.VERSION
