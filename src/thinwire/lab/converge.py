"""Trains the same task with several methods on ranks in memory, for `thinwire bench converge`.

Every run is one file in the results directory. Interrupted runs resume from their last checkpoint, complete ones are not
repeated; several processes may share a directory.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..comm.world import LocalWorld
from . import run_file, trainers
from .job_stream import Watcher
from .netns import LabError
from .tasks import Task, load
from .trainers import REFERENCE, Exclusions, GradientTrainer, Method

TRACE_POINTS = 60
FORMAT = 1


class Unfinished(LabError):
    """The time limit was reached; progress is saved."""


@dataclass(frozen=True)
class Options:
    workload: str
    methods: tuple[str, ...]
    data: Path
    results: Path
    workers: int = 4
    seeds: int = 3
    evaluations: int = 6
    recipe: dict[str, Any] = field(default_factory=dict)
    exceptions: Exclusions = field(default_factory=Exclusions)
    save_seconds: float = 20.0
    end: float = math.inf
    """Time to stop, by `time.monotonic`."""


@dataclass(frozen=True)
class Spec:
    """Everything that determines the result of a run."""

    task: Task
    method: Method
    workers: int
    seed: int
    evaluations: int
    exceptions: Exclusions

    def facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "workload": self.task.name,
            "method": self.method.text,
            "codec": self.method.full(),
            "workers": self.workers,
            "seed": self.seed,
            "evaluations": self.evaluations,
            "samples": [len(self.task.train), len(self.task.test)],
            "recipe": dataclasses.asdict(self.task.recipe),
            "exceptions": dataclasses.asdict(self.exceptions),
        }

    @property
    def name(self) -> str:
        facts = json.dumps(self.facts(), sort_keys=True)
        return name_of(f"{self.task.name}-{self.workers}w", self.method.text, self.seed, facts)


def name_of(place: str, method: str, seed: int, facts: str) -> str:
    """The name of a run's files: readable, and different for different facts."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", method).strip("-")[:60]
    return f"{place}-{words}-s{seed}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def specs(options: Options) -> list[Spec]:
    """The requested runs, seed by seed. Raises `LabError` for invalid ones before the first run."""
    methods = [Method.parse(text) for text in options.methods]
    texts = [method.text for method in methods]
    if not texts:
        raise LabError("there is no method to run")
    if len(set(texts)) != len(texts):
        raise LabError("a method is given twice")
    if options.seeds < 1 or options.workers < 1 or options.evaluations < 1:
        raise LabError("workers, seeds and evaluations must be at least 1")
    task = load(options.workload, options.data, **options.recipe)
    recipe = task.recipe
    if recipe.batch % options.workers:
        raise LabError(f"a batch of {recipe.batch} cannot be shared by {options.workers} workers: see --batch-size")
    for method in methods:
        if method.momentum and (recipe.optimizer != "sgd" or method.updates is not None):
            raise LabError(
                f"{method.text!r} applies momentum instead of SGD, which does not work with {recipe.optimizer}"
            )
    return [
        Spec(task, method, options.workers, seed, options.evaluations, options.exceptions)
        for seed in range(options.seeds)
        for method in methods
    ]


def run(options: Options, watcher: Watcher, todo: Sequence[Spec] | None = None) -> list[dict[str, Any]]:
    """The results of all runs of `specs`, in that order, without runs that another process works on."""
    todo = specs(options) if todo is None else todo
    options.results.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for spec in todo:
        path = options.results / f"{spec.name}.json"
        with _claim(path.with_suffix(".lock")) as mine:
            outcome = run_file.read(path)
            if outcome is None and mine:
                outcome = _train(spec, path, options.save_seconds, options.end, watcher)
            elif outcome is None:
                watcher.tell(f"{spec.name}: another process works on it")
            else:
                watcher.advance(spec.task.recipe.steps)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Lock a run; False if another process holds it. The kernel releases the lock when the process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


def _train(spec: Spec, path: Path, save_seconds: float, end: float, watcher: Watcher) -> dict[str, Any]:
    torch.set_num_threads(1)
    record = Record(spec, path)
    resumed = record.resume()
    if resumed:
        watcher.tell(f"{spec.name}: resumes after step {resumed}")
    watcher.advance(resumed)
    saved = time.monotonic()
    while not record.finished:
        if time.monotonic() > end:
            record.save()
            raise Unfinished(
                f"time limit reached at step {record.trainer.done} of {spec.name}: repeat the command to continue"
            )
        record.step()
        watcher.advance(1)
        if time.monotonic() - saved > save_seconds:
            record.save()
            saved = time.monotonic()
    watcher.advance(spec.task.recipe.steps - record.trainer.done)
    return record.finish()


class Record:
    """A run in progress and its results so far."""

    def __init__(self, spec: Spec, path: Path) -> None:
        self.spec, self.path = spec, path
        self.checkpoint = path.with_suffix(".checkpoint")
        world = LocalWorld(spec.workers)
        self.trainer = trainers.make(spec.task, spec.method, spec.seed, spec.workers, world, spec.exceptions)
        self.trace: list[dict[str, float | None]] = []
        self.curve: list[dict[str, float | None]] = []
        self.losses: list[float] = []
        self.seconds = 0.0
        self.diverged = False
        self._earlier = {"link_bytes": 0.0}
        self._earlier_groups: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self.diverged or self.trainer.done >= self.spec.task.recipe.steps

    def step(self) -> None:
        trainer, steps = self.trainer, self.spec.task.recipe.steps
        begun = time.perf_counter()
        loss = trainer.step()
        self.seconds += time.perf_counter() - begun
        self.losses.append(loss)
        done = trainer.done
        # The loss will not become finite again, so the run ends here.
        self.diverged = not math.isfinite(loss)
        if _falls_on(done, steps, min(TRACE_POINTS, steps)) or self.diverged:
            if isinstance(trainer, GradientTrainer):
                trainer.look()
            self.trace.append({"step": done, "loss": _mean(self.losses), "support": trainer.support, **self._now()})
            self.losses = []
        if _falls_on(done, steps, min(self.spec.evaluations, steps)) or self.diverged:
            numbers = trainer.evaluate()
            self.curve.append({"step": done, **{key: _finite(value) for key, value in numbers.items()}, **self._now()})

    def _now(self) -> dict[str, float | None]:
        numbers = self.trainer.numbers()
        for key, value in self._earlier.items():
            numbers[key] += value
        return {**{key: _finite(value) for key, value in numbers.items()}, "seconds": _finite(self.seconds)}

    def _groups(self) -> dict[str, float]:
        now = self.trainer.bytes_by_group()
        return {name: size + self._earlier_groups.get(name, 0.0) for name, size in now.items()}

    def save(self) -> None:
        content = {
            "state": self.trainer.state(),
            "done": self.trainer.done,
            "trace": self.trace,
            "curve": self.curve,
            "losses": self.losses,
            "seconds": self.seconds,
            "diverged": self.diverged,
            "earlier": self._totals(),
            "groups": self._groups(),
        }
        temporary = self.checkpoint.with_suffix(f".{os.getpid()}")
        torch.save(content, temporary)
        temporary.replace(self.checkpoint)

    def _totals(self) -> dict[str, float]:
        numbers = self.trainer.numbers()
        return {key: numbers[key] + value for key, value in self._earlier.items()}

    def resume(self) -> int:
        """Resume from the last checkpoint, if any; returns the number of completed steps."""
        if not self.checkpoint.exists():
            return 0
        try:
            content = torch.load(self.checkpoint, weights_only=True)
        except Exception as error:  # torch.load raises whatever the bytes make it raise
            raise LabError(f"{str(self.checkpoint)!r} cannot be read, remove it: {error}") from None
        if set(content["earlier"]) != set(self._earlier):
            raise LabError(f"{str(self.checkpoint)!r} is of another version, which counted other bytes: remove it")
        self.trainer.load(content["state"])
        self.trainer.done = content["done"]
        self.trace, self.curve, self.losses = content["trace"], content["curve"], content["losses"]
        self.seconds, self.diverged = content["seconds"], content["diverged"]
        self._earlier, self._earlier_groups = content["earlier"], content["groups"]
        return self.trainer.done

    def finish(self) -> dict[str, Any]:
        outcome = {"spec": self.spec.facts(), "row": self._row(), "curve": self.curve, "trace": self.trace}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(_compact(outcome))
        temporary.replace(self.path)
        self.checkpoint.unlink(missing_ok=True)
        self.trainer.close()
        return outcome

    def _row(self) -> dict[str, Any]:
        spec, done = self.spec, self.trainer.done
        elements = sum(p.numel() for p in spec.task.model(spec.seed).parameters())
        totals, last = self._totals(), self.curve[-1]
        late = [point["support"] for point in self.trace[len(self.trace) // 2 :] if point["support"] is not None]
        row = {
            "workload": spec.task.name,
            "method": spec.method.text,
            "workers": spec.workers,
            "seed": spec.seed,
            "metric": spec.task.metric,
            "value": last["value"],
            "value_shared": last.get("value_shared"),
            "test_loss": last["test_loss"],
            "steps": done,
            "diverged": self.diverged or last["value"] is None,
            "parameters": elements,
            **run_file.columns(totals["link_bytes"] / done, elements, spec.workers),
            "density": sum(late) / len(late) if late else None,
            "residual_norm": last["residual_norm"],
            "seconds": self.seconds,
        }
        if spec.exceptions.by_layer:
            rates = trainers.rates_by_kind(self.trainer, self._groups(), done)
            row |= {f"rate_{kind}": rate for kind, rate in rates.items()}
        return row


def reference_of(options: Options, spec: Spec) -> dict[str, Any] | None:
    """The dense run with the same task, workers and seed, or None."""
    own = dataclasses.replace(spec, method=Method.parse(REFERENCE), exceptions=Exclusions())
    return run_file.read(options.results / f"{own.name}.json")


def _falls_on(done: int, steps: int, points: int) -> bool:
    """Whether `done` is one of `points` equally spaced steps that end with the last."""
    return done * points // steps != (done - 1) * points // steps


def _mean(values: Sequence[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _finite(value: float) -> float | None:
    """None for values that JSON cannot represent; others are rounded to six digits to keep files small."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _compact(outcome: dict[str, Any]) -> str:
    """JSON with one line per point of a curve."""
    parts = []
    for key, value in outcome.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"    {json.dumps(point)}" for point in value) + "\n  ]"
        else:
            text = json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
