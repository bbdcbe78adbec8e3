"""How the magnitudes that a codec sees are distributed while a model learns: `thinwire bench converge --fits`.

Nothing but the exchanges that a codec looks at is reported, and nothing is evaluated or kept in the results directory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..comm.world import LocalWorld
from ..engine import fits
from . import trainers
from .converge import Spec
from .job_stream import Watcher
from .netns import LabError


def run(todo: Sequence[Spec], watcher: Watcher) -> list[dict[str, Any]]:
    """One flat row per run, exchange that was looked at, and group, of the first rank."""
    torch.set_num_threads(1)
    return [row for spec in todo for row in _rows(spec, watcher)]


def _rows(spec: Spec, watcher: Watcher) -> Iterator[dict[str, Any]]:
    trainer = trainers.make(spec.task, spec.method, spec.seed, spec.workers, LocalWorld(spec.workers), spec.exceptions)
    looks = 0
    for _ in range(spec.task.recipe.steps):
        trainer.step()
        watcher.advance(1)
        for run in trainer.wire.executor.rank_states[0].groups:
            state = fits.of(run)
            if state is None or state.fitted is None or state.fitted_at != state.step:
                continue
            looks += 1
            yield {
                "workload": spec.task.name,
                "method": spec.method.text,
                "workers": spec.workers,
                "seed": spec.seed,
                "step": trainer.done,
                "group": run.info.name,
                "elements": run.info.elements,
                "zeros": 1.0 - state.fitted.nonzero / run.info.elements,
                "mean": state.fitted.mean,
                "closest": state.fitted.best.model.name,
                **{fit.model.name: fit.distance for fit in state.fitted.fits},
            }
    trainer.close()
    if not looks:
        raise LabError(f"{spec.method.text!r} takes no look at magnitudes; laplace does")
