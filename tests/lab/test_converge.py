"""`thinwire bench converge`: runs that can be killed, ranks in memory against real ones, and its arithmetic."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import thinwire
from tests import ranks
from thinwire.cli.app import app
from thinwire.comm.collectives import Collective, Pending
from thinwire.lab import LabError, converge, converge_tables, converge_time, tasks, trainers
from thinwire.lab.trainers import Exclusions, Method

from .conftest import needs_namespaces

ROW = {
    *("workload", "method", "workers", "seed", "metric", "value", "steps", "bytes_per_rank", "compression_rate"),
    *("seconds", "density", "residual_norm", "diverged"),
}
TASKS = {"mnist-cnn": 16, "cifar-resnet": 8, "shakespeare-lstm": 4, "shakespeare-gpt": 4, "wikitext-lstm": 4}


def _images(path: Path, shape: tuple[int, ...], train: int) -> None:
    """Ten patterns with noise: easy to learn."""
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 256, (10, *shape))
    parts = {}
    for part, count in (("train", train), ("test", 100)):
        labels = np.arange(count) % 10
        noise = generator.integers(-40, 40, (count, *shape))
        parts[f"x_{part}"] = np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8)
        parts[f"y_{part}"] = labels.astype(np.uint8)
    np.savez(path, **parts)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    _images(folder / "mnist.npz", (28, 28), 400)
    _images(folder / "cifar10.npz", (32, 32, 3), 80)
    (folder / "tinyshakespeare.txt").write_text("to be, or not to be: that is the question\n" * 60)
    for part, lines in (("train", 40), ("valid", 8)):
        with gzip.open(folder / f"wikitext2.{part}.txt.gz", "wt") as file:
            file.write("the quick brown fox jumps over the lazy dog\n" * lines)
    return folder


def _run(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", "converge", *map(str, words)])


# -- whole commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", TASKS)
def test_every_workload_has_rows_and_a_table(workload: str, data: Path, tmp_path: Path) -> None:
    options = ["--data", data, "--workload", workload, "--results", tmp_path / "runs", "--json", tmp_path / "out.json"]
    options += ["--steps", 3, "--batch-size", TASKS[workload], "--seeds", 2, "--workers", 2, "--evaluations", 2]
    outcome = _run(*options, "--method", "dense,adacomp")
    assert outcome.exit_code == 0, outcome.output
    assert "adacomp" in outcome.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["command"] == "bench converge"
    assert [(row["method"], row["seed"]) for row in content["rows"]] == [
        *(("dense", 0), ("adacomp", 0), ("dense", 1), ("adacomp", 1)),
    ]
    for row in content["rows"]:
        assert set(row) >= ROW
        assert row["steps"] == 3
        assert not any(isinstance(value, dict | list) for value in row.values())
    dense, adacomp = content["summary"]["methods"]
    assert dense["compression_rate"] == pytest.approx(1.0)
    assert {row["counted_by"] for row in content["rows"]} == {"formula"}
    assert adacomp["compression_rate"] > 5.0
    assert adacomp["difference"] is not None
    assert dense["difference"] is None
    # Complete runs are read, not repeated.
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert len(files) == 4
    assert _run(*options, "--method", "dense,adacomp").exit_code == 0
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}


def test_models_learn_and_rates_are_told_by_layer(data: Path, tmp_path: Path) -> None:
    options = ["--data", data, "--results", tmp_path, "--json", tmp_path / "out", "--epochs", 3, "--batch-size", 32]
    outcome = _run(
        *options, "--seeds", 1, "--by-layer", "--method", "dense,adacomp,updates(randomblock(ratio=4), 0.3)"
    )
    assert outcome.exit_code == 0, outcome.output
    dense, adacomp, updates = json.loads((tmp_path / "out").read_text())["rows"]
    assert dense["value"] > 0.95
    assert adacomp["value"] > 0.9
    assert adacomp["rate_conv"] > 7.0
    assert adacomp["rate_dense"] > 10.0
    assert updates["value_shared"] is not None
    assert updates["residual_norm"] > 0.0


def test_fits_are_reported_over_training(data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--results", tmp_path / "runs", "--seeds", 1, "--steps", 11, "--batch-size", 8]
    outcome = _run(*words, "--fits", "--method", "laplace(density=0.01)", "--json", tmp_path / "out")
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    assert [row["step"] for row in rows] == [1, 10]
    for row in rows:
        assert row["closest"] == min(("laplace", "gauss", "pareto"), key=lambda name: row[name])
        assert 0.0 <= row["zeros"] < 1.0
    assert not list((tmp_path / "runs").glob("*.json")), "a run is not complete with it"
    outcome = _run(*words, "--fits", "--method", "topk(density=0.01)")
    assert outcome.exit_code == 1
    assert "takes no look at magnitudes" in outcome.output


def test_it_stops_when_the_time_is_over_and_goes_on(data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--results", tmp_path, "--steps", 4, "--seeds", 1, "--method", "dense", "--batch-size", 8]
    first = _run(*words, "--limit-seconds", 0)
    assert first.exit_code == 75, first.output
    assert "repeat the command to continue" in first.output
    assert _run(*words).exit_code == 0


METHODS = ("micro(density=0.05)", "updates(randomblock(ratio=4), 0.3)")


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_goes_on_with_the_same_bits(method: str, data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--seeds", 1, "--method", method, "--epochs", 2, "--batch-size", 8, "--save-seconds", 0]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "thinwire", "bench", "converge", *map(str, words), "--results", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not list(killed.glob("*.checkpoint")) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was over before it could be killed"
    (checkpoint,) = killed.glob("*.checkpoint")
    done = torch.load(checkpoint)["done"]
    assert 0 < done < 100
    assert not list(killed.glob("*.json"))

    outcome = _run(*words, "--results", killed)
    assert outcome.exit_code == 0, outcome.output
    assert f"resumes after step {done}" in outcome.output
    assert _run(*words, "--results", whole).exit_code == 0
    contents = [_without_seconds(next(folder.glob("*.json"))) for folder in (killed, whole)]
    assert contents[0] == contents[1]
    assert not list(killed.glob("*.checkpoint"))


def _without_seconds(path: Path) -> Any:
    content = json.loads(path.read_text())
    for point in (content["row"], *content["curve"], *content["trace"]):
        assert point.pop("seconds") > 0
    return content


# -- ranks in memory and real ones -------------------------------------------------------------------------------------


def _steps(text: str, folder: str, seed: int, count: int, workers: int, world: Any) -> list[Tensor]:
    task = tasks.load("mnist-cnn", Path(folder), batch=24, steps=count, clip=5.0)
    torch.set_num_threads(1)  # as real ranks have
    # Small tensors would be all-reduced, which gloo does not do in rank order.
    contestant = trainers.make(task, Method.parse(text), seed, workers, world, Exclusions(min_elements=0))
    for _ in range(count):
        contestant.step()
    model = contestant.model if isinstance(contestant, trainers.GradientTrainer) else contestant.models[0]  # type: ignore[attr-defined]
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    contestant.close()
    return parameters


def _real(text: str, folder: str, seed: int, count: int) -> list[Tensor]:
    return _steps(text, folder, seed, count, 3, None)


@pytest.mark.parametrize("text", ["laplace(density=0.02)", "topk(density=0.02, momentum=0.9)", "adacomp", "sign"])
def test_gathered_codecs_train_with_the_same_bits_in_memory_and_on_gloo(text: str, data: Path) -> None:
    here = _steps(text, str(data), 1, 12, 3, thinwire.LocalWorld(3))
    for parameters in ranks.run(3, _real, text, str(data), 1, 12):
        assert all(map(torch.equal, parameters, here))


@pytest.mark.parametrize("text", ["dense", "micro(density=0.02)", "lowrank(rank=2)", METHODS[1]])
def test_summed_codecs_train_alike_in_memory_and_on_gloo(text: str, data: Path) -> None:
    """gloo does not add in rank order, so the last bit may differ, and grows."""
    here = _steps(text, str(data), 1, 5, 3, thinwire.LocalWorld(3))
    for parameters in ranks.run(3, _real, text, str(data), 1, 5)[:1]:
        for parameter, expected in zip(parameters, here, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=1e-3, atol=1e-4)


class _CountingWorld(thinwire.LocalWorld):
    """Adds up what the collectives put on the link of the first rank."""

    link_bytes = 0.0

    def issue(self, round_: int, parts: Sequence[Collective], wake: Callable[[], None]) -> Pending:
        self.link_bytes += parts[0].traffic(self.size)
        return super().issue(round_, parts, wake)


@pytest.mark.parametrize("text", ["topk(density=0.02)", "micro(density=0.02)", METHODS[1], "updates(adacomp, 0.3)"])
def test_bytes_are_those_on_the_link(text: str, data: Path) -> None:
    """All that the collectives of all steps put there, in gradient and in update space; evaluation sends no step's."""
    world = _CountingWorld(4)
    trainer = trainers.make(tasks.load("cifar-resnet", data, batch=8, steps=4), Method.parse(text), 0, 4, world)
    before = world.link_bytes  # the start of training is no step
    for _ in range(3):
        trainer.step()
    expected = world.link_bytes - before
    assert expected > 0.0
    assert trainer.numbers()["link_bytes"] == expected
    trainer.evaluate()
    assert trainer.numbers()["link_bytes"] == expected
    trainer.close()


@pytest.mark.parametrize("workload", ["mnist-cnn", "cifar-resnet", "shakespeare-lstm"])
def test_any_number_of_workers_meets_the_same_samples(workload: str, data: Path) -> None:
    task = tasks.load(workload, data, batch=8)
    whole = task.batch(3, 5, 0, 1)
    for workers in (2, 4, 8):
        pieces = [task.batch(3, 5, rank, workers) for rank in range(workers)]
        for part in (0, 1):
            assert torch.equal(torch.cat([piece[part] for piece in pieces]), whole[part])
    assert not torch.equal(task.batch(4, 5, 0, 1)[1], whole[1])


def test_the_codec_takes_over_momentum_and_gradients_are_clipped_before_feedback(data: Path) -> None:
    task = tasks.load("mnist-cnn", data, batch=8, clip=1e-3, lr=1.0, steps=100)
    recipe = dataclasses.replace(task.recipe, warm_up=0, weight_decay=0.0)
    task = dataclasses.replace(task, recipe=recipe)
    one = trainers.make(task, Method.parse("micro(momentum=0.9)"), 0, 2, thinwire.LocalWorld(2))
    assert [group["momentum"] for group in one.optimizer.param_groups] == [0.0]
    decay = dataclasses.replace(recipe, weight_decay=1e-4).make([torch.zeros(1)], corrected=0.9).param_groups[0]
    assert decay["weight_decay"] == pytest.approx(1e-3)  # what momentum would have made of it
    dense = trainers.make(task, Method.parse("dense"), 0, 2, thinwire.LocalWorld(2))
    assert [group["momentum"] for group in dense.optimizer.param_groups] == [0.9]
    assert isinstance(dense, trainers.GradientTrainer)
    before = [parameter.detach().clone() for parameter in dense.model.parameters()]
    dense.step()
    moved = sum(float((p.detach() - b).square().sum()) for p, b in zip(dense.model.parameters(), before, strict=True))
    assert 1e-4 < moved**0.5 <= 1.001e-3


# -- arithmetic and errors ---------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed() -> None:
    common = {"workload": "w", "workers": 4, "metric": "accuracy", "diverged": False, "bytes_per_rank": 1.0}
    rows = [
        {**common, "method": method, "seed": seed, "value": value}
        for method, values in (("dense", (0.9, 0.7, 0.8)), ("micro", (0.88, 0.69, 0.77)))
        for seed, value in enumerate(values)
    ]
    dense, micro = converge_tables.summarise(rows)
    assert dense["mean"] == pytest.approx(0.8)
    assert dense["spread"] == pytest.approx(0.1)
    assert micro["difference"] == pytest.approx(-0.02)
    assert micro["standard_error"] == pytest.approx(0.01 / 3**0.5)
    (alone,) = converge_tables.summarise(rows[3:])
    assert alone["difference"] is None
    (with_references,) = converge_tables.summarise(rows[3:], rows[:3])
    assert with_references["difference"] == pytest.approx(-0.02)


def test_learning_rates() -> None:
    recipe = tasks.Recipe(lr=1.0, batch=1, steps=100, warm_up=10)
    assert recipe.rate_at(0) == pytest.approx(0.1)
    assert recipe.rate_at(10) == 1.0
    assert 0.0 < recipe.rate_at(99) < 0.01
    stairs = dataclasses.replace(recipe, schedule="steps")
    assert [stairs.rate_at(step) for step in (49, 50, 75)] == pytest.approx([1.0, 0.1, 0.01])


def test_a_run_that_diverges_says_so(data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--results", tmp_path, "--seeds", 1, "--steps", 40, "--batch-size", 8]
    outcome = _run(*words, "--json", tmp_path / "out", "--lr", 1e30, "--method", "dense")
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads((tmp_path / "out").read_text())["rows"]
    assert row["diverged"]
    assert row["steps"] < 40
    assert "1 diverged" in outcome.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "mnist"], "choose one of mnist-cnn"),
        (["--data", "/nowhere"], "'/nowhere' with the data does not exist"),
        (["--method", "micr"], "did you mean 'micro'"),
        (["--method", "dense,dense"], "given twice"),
        (["--method", ","], "no method"),
        (["--method", "micro@lr=fast"], "what follows @lr= is a learning rate"),
        (["--method", "updates(0.3)"], "is not understood"),
        (["--workers", "3"], "cannot be shared by 3 workers"),
        (["--workers", "some"], "is not a list of numbers"),
        (["--workers", "0"], "must be at least 1"),
        (["--schedule", "linear"], "choose one of cosine, steps, constant"),
        (["--batch-size", "4000"], "choose 1 to 400"),
        (["--target", "0.9"], "--target requires --rate"),
        (["--rate", "1gbit"], "--rate measures the time to a --target"),
        (["--rate", "1gbit", "--target", "97"], "between 0 and 1"),
        (["--rate", "fast", "--target", "0.9"], "'fast' is not understood"),
        (["--rate", "1gbit", "--target", "0.9", "--method", "no-plan.json"], "no-plan.json"),
        (["--fits", "--rate", "1gbit"], "--fits goes with neither --rate nor --plot"),
        (["--epochs", "1", "--steps", "3"], "either --epochs or --steps"),
        (["--lr", "-1"], "--lr must be above 0"),
        (["--workload", "shakespeare-gpt", "--method", "micro(momentum=0.9)"], "applies momentum instead of SGD"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(
    words: list[str], message: str, data: Path, tmp_path: Path
) -> None:
    outcome = _run("--data", data, "--results", tmp_path / "runs", *words)
    assert outcome.exit_code == 1, outcome.output
    assert message in " ".join(outcome.output.split())
    assert not (tmp_path / "runs").exists()


def test_files_that_are_not_what_they_should_be(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mnist.npz").write_bytes(b"not an npz")
    with pytest.raises(LabError, match="x_train, y_train"):
        tasks.load("mnist-cnn", tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_text("short")
    with pytest.raises(LabError, match="too few"):
        tasks.load("shakespeare-gpt", tmp_path)
    options = converge.Options("mnist-cnn", ("dense",), data, tmp_path, seeds=1, recipe={"steps": 2, "batch": 8})
    (spec,) = converge.specs(options)
    (tmp_path / f"{spec.name}.checkpoint").write_bytes(os.urandom(100))
    with pytest.raises(LabError, match="cannot be read, remove it"):
        converge.run(options, converge.Watcher())
    torch.save({"earlier": {"bytes": 1.0, "traffic": 2.0}}, tmp_path / f"{spec.name}.checkpoint")
    with pytest.raises(LabError, match="counted other bytes: remove it"):
        converge.run(options, converge.Watcher())
    (tmp_path / f"{spec.name}.json").write_text("{}")
    with pytest.raises(LabError, match="not the result of a run"):
        converge.run(options, converge.Watcher())


def test_plots_of_runs_and_of_many_workers(data: Path, tmp_path: Path) -> None:
    words = ["--data", data, "--results", tmp_path, "--steps", 4, "--batch-size", 16, "--seeds", 1, "--evaluations", 1]
    outcome = _run(*words, "--workers", "2,4", "--method", "dense,topk(density=0.1)", "--plot", tmp_path / "a.svg")
    assert outcome.exit_code == 0, outcome.output
    for text in ("dense, 2 workers", "topk(density=0.1), 4 workers", "seconds of training"):
        assert f"<!-- {text} -->" in (tmp_path / "a.svg").read_text()
    for text in ("topk(density=0.1)", "workers", "4"):
        assert f"<!-- {text} -->" in (tmp_path / "a-workers.svg").read_text()


# -- time to accuracy --------------------------------------------------------------------------------------------------


def test_methods_of_a_time_to_accuracy(data: Path, tmp_path: Path) -> None:
    methods = ("fp32", "powersgd1", "auto", "auto@plan.json", "adacomp@lr=0.01", METHODS[1])
    options = converge_time.Options("mnist-cnn", methods, data, "1gbit", 0.9, results=tmp_path)
    converge_time.check(options)
    assert len({options.file(method, seed) for method in methods for seed in (0, 1)}) == 2 * len(methods)
    with pytest.raises(LabError, match="did you mean"):
        converge_time.check(dataclasses.replace(options, methods=("adacmp",)))


@needs_namespaces
def test_time_to_accuracy_over_a_shaped_link(data: Path, tmp_path: Path) -> None:
    methods = ["fp32", "micro(density=0.05)", METHODS[1]]
    words = ["--data", data, "--rate", "1gbit", "--target", 0.5, "--seeds", 1, "--batch-size", 16, "--epochs", 8]
    words += ["--results", tmp_path / "runs"]
    outcome = _run(*words, "--method", ",".join(methods), "--json", tmp_path / "out")
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    assert [row["method"] for row in rows] == methods
    for row in rows:
        assert row["value"] >= 0.5
        assert row["steps"] % 20 == 0
        assert row["seconds_to_target"] == pytest.approx(row["setup_seconds"] + row["seconds"])
    assert rows[0]["speedup_over_fp32"] == 1.0
    assert {row["counted_by"] for row in rows} == {"interface"}
    assert rows[1]["bytes_per_rank"] < 0.3 * rows[0]["bytes_per_rank"]
