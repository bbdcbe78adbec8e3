"""The same training with many methods, on ranks in memory: what `thinwire bench converge` runs.

Every run is a file of its own in the results directory. A run that was killed goes on from its last checkpoint, one that
is complete is not repeated; several processes may work on the same directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..schemes.world import LocalWorld
from . import contest
from .contest import REFERENCE, Exceptions, Gradients, Method
from .netns import LabError
from .tasks import Task, load

TRACE_POINTS = 60
FORMAT = 1


class Unfinished(LabError):
    """The time that was given is over; what was done is saved."""


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
    exceptions: Exceptions = field(default_factory=Exceptions)
    save_seconds: float = 20.0
    end: float = math.inf
    """When to stop, by `time.monotonic`."""


@dataclass(frozen=True)
class Watcher:
    """Who wants to hear of progress: words for people, and steps that are done."""

    tell: Callable[[str], None] = lambda text: None
    steps: Callable[[int], None] = lambda count: None


@dataclass(frozen=True)
class Spec:
    """What a run is: whatever would change its result."""

    task: Task
    method: Method
    workers: int
    seed: int
    evaluations: int
    exceptions: Exceptions

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
        digest = hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()[:8]
        words = re.sub(r"[^A-Za-z0-9.]+", "-", self.method.text).strip("-")[:60]
        return f"{self.task.name}-{self.workers}w-{words}-s{self.seed}-{digest}"


def specs(options: Options) -> list[Spec]:
    """All runs that are asked for, seed by seed. Refuses what could not be run, before the first one."""
    methods = [Method.parse(text) for text in options.methods]
    texts = [method.text for method in methods]
    if not texts:
        raise LabError("there is no method to run")
    if len(set(texts)) != len(texts):
        raise LabError("a method is given twice")
    if options.seeds < 1 or options.workers < 1 or options.evaluations < 1:
        raise LabError("workers, seeds and evaluations are numbers from 1 on")
    task = load(options.workload, options.data, **options.recipe)
    recipe = task.recipe
    if recipe.batch % options.workers:
        raise LabError(f"a batch of {recipe.batch} cannot be shared by {options.workers} workers: see --batch-size")
    for method in methods:
        if method.momentum and (recipe.optimizer != "sgd" or method.updates is not None):
            raise LabError(
                f"{method.text!r} brings momentum, which takes the place of SGD's: not for {recipe.optimizer}"
            )
    return [
        Spec(task, method, options.workers, seed, options.evaluations, options.exceptions)
        for seed in range(options.seeds)
        for method in methods
    ]


def run(options: Options, watcher: Watcher, todo: Sequence[Spec] | None = None) -> list[dict[str, Any]]:
    """The results of all runs of `specs`, in that order; those that another process works on are left out."""
    todo = specs(options) if todo is None else todo
    options.results.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for spec in todo:
        path = options.results / f"{spec.name}.json"
        with _claim(path.with_suffix(".lock")) as mine:
            outcome = read(path)
            if outcome is None and mine:
                outcome = _train(spec, path, options.save_seconds, options.end, watcher)
            elif outcome is None:
                watcher.tell(f"{spec.name}: another process works on it")
            else:
                watcher.steps(spec.task.recipe.steps)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def read(path: Path) -> dict[str, Any] | None:
    """The result of a run, if it is complete."""
    try:
        content = json.loads(path.read_text())
        return dict(content) if content["row"] and content["spec"] else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{str(path)!r} is not the result of a run, remove it: {error!r}") from None


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[bool]:
    """Whether this process is the one that works on a run. The kernel gives it free when the process ends, however it does."""
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
        watcher.tell(f"{spec.name}: goes on after step {resumed}")
    watcher.steps(resumed)
    saved = time.monotonic()
    while not record.finished:
        if time.monotonic() > end:
            record.save()
            raise Unfinished(
                f"the time is over at step {record.contestant.done} of {spec.name}: the same command goes on"
            )
        record.step()
        watcher.steps(1)
        if time.monotonic() - saved > save_seconds:
            record.save()
            saved = time.monotonic()
    watcher.steps(spec.task.recipe.steps - record.contestant.done)
    return record.finish()


class Record:
    """A run under way, and what it has shown so far."""

    def __init__(self, spec: Spec, path: Path) -> None:
        self.spec, self.path = spec, path
        self.checkpoint = path.with_suffix(".checkpoint")
        world = LocalWorld(spec.workers)
        self.contestant = contest.make(spec.task, spec.method, spec.seed, spec.workers, world, spec.exceptions)
        self.trace: list[dict[str, float | None]] = []
        self.curve: list[dict[str, float | None]] = []
        self.losses: list[float] = []
        self.seconds = 0.0
        self.diverged = False
        self._earlier = {"bytes": 0.0, "traffic": 0.0}
        self._earlier_groups: dict[str, float] = {}

    @property
    def finished(self) -> bool:
        return self.diverged or self.contestant.done >= self.spec.task.recipe.steps

    def step(self) -> None:
        contestant, steps = self.contestant, self.spec.task.recipe.steps
        begun = time.perf_counter()
        loss = contestant.step()
        self.seconds += time.perf_counter() - begun
        self.losses.append(loss)
        done = contestant.done
        # A loss that is not a number stays so: the rest of the run would show nothing.
        self.diverged = not math.isfinite(loss)
        if _falls_on(done, steps, min(TRACE_POINTS, steps)) or self.diverged:
            if isinstance(contestant, Gradients):
                contestant.look()
            self.trace.append({"step": done, "loss": _mean(self.losses), "support": contestant.support, **self._now()})
            self.losses = []
        if _falls_on(done, steps, min(self.spec.evaluations, steps)) or self.diverged:
            numbers = contestant.evaluate()
            self.curve.append({"step": done, **{key: _finite(value) for key, value in numbers.items()}, **self._now()})

    def _now(self) -> dict[str, float | None]:
        numbers = self.contestant.numbers()
        for key, value in self._earlier.items():
            numbers[key] += value
        return {**{key: _finite(value) for key, value in numbers.items()}, "seconds": _finite(self.seconds)}

    def _groups(self) -> dict[str, float]:
        now = self.contestant.bytes_by_group()
        return {name: size + self._earlier_groups.get(name, 0.0) for name, size in now.items()}

    def save(self) -> None:
        content = {
            "state": self.contestant.state(),
            "done": self.contestant.done,
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
        numbers = self.contestant.numbers()
        return {key: numbers[key] + value for key, value in self._earlier.items()}

    def resume(self) -> int:
        """Go on where a killed run was saved last; the number of steps that are done."""
        if not self.checkpoint.exists():
            return 0
        try:
            content = torch.load(self.checkpoint, weights_only=True)
        except Exception as error:  # torch.load raises whatever the bytes make it raise
            raise LabError(f"{str(self.checkpoint)!r} cannot be read, remove it: {error}") from None
        self.contestant.load(content["state"])
        self.contestant.done = content["done"]
        self.trace, self.curve, self.losses = content["trace"], content["curve"], content["losses"]
        self.seconds, self.diverged = content["seconds"], content["diverged"]
        self._earlier, self._earlier_groups = content["earlier"], content["groups"]
        return self.contestant.done

    def finish(self) -> dict[str, Any]:
        outcome = {"spec": self.spec.facts(), "row": self._row(), "curve": self.curve, "trace": self.trace}
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(_compact(outcome))
        temporary.replace(self.path)
        self.checkpoint.unlink(missing_ok=True)
        self.contestant.close()
        return outcome

    def _row(self) -> dict[str, Any]:
        spec, done = self.spec, self.contestant.done
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
            "bytes_per_rank": totals["bytes"] / done,
            "traffic_per_rank": totals["traffic"] / done,
            "compression_rate": 4.0 * elements * done / totals["bytes"] if totals["bytes"] else None,
            "density": sum(late) / len(late) if late else None,
            "residual_norm": last["residual_norm"],
            "seconds": self.seconds,
        }
        if spec.exceptions.by_layer:
            rates = contest.rates_by_kind(self.contestant, self._groups(), done)
            row |= {f"rate_{kind}": rate for kind, rate in rates.items()}
        return row


def reference_of(options: Options, spec: Spec) -> dict[str, Any] | None:
    """The dense run of the same task, workers and seed, if there is one."""
    own = dataclasses.replace(spec, method=Method.parse(REFERENCE), exceptions=Exceptions())
    return read(options.results / f"{own.name}.json")


def _falls_on(done: int, steps: int, points: int) -> bool:
    """Whether this is one of so many equally spaced steps, of which the last is the end."""
    return done * points // steps != (done - 1) * points // steps


def _mean(values: Sequence[float]) -> float | None:
    return _finite(sum(values) / len(values)) if values else None


def _finite(value: float) -> float | None:
    """JSON has no numbers that are not finite; six digits are enough, and keep files small."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _compact(outcome: dict[str, Any]) -> str:
    """One line for every point of a curve."""
    parts = []
    for key, value in outcome.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"    {json.dumps(point)}" for point in value) + "\n  ]"
        else:
            text = json.dumps(value)
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
