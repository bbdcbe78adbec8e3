"""How the magnitudes of each group are distributed, as far as its codec has looked: for the journal, `stats` and `explain`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..codecs.laplace import LaplaceState
from . import journal

if TYPE_CHECKING:
    from ..kernels.cpu.laplace_fit import Fitted
    from .rank_state import GroupExchange, RankState


def of(run: GroupExchange) -> LaplaceState | None:
    """What a codec of this group last saw."""
    states = [state for state in run.way.states if isinstance(state, LaplaceState) and state.fitted is not None]
    return max(states, key=lambda state: state.fitted_at, default=None)


def lines(rank_state: RankState, *, fresh: bool) -> Iterator[journal.Fit]:
    """A line of the journal for every group that has been looked at; only those of the last step if `fresh`."""
    for run in rank_state.groups:
        state = of(run)
        if state is not None and state.fitted is not None and (state.fitted_at == state.step or not fresh):
            yield line(state.fitted_at, run.info.name, run.info.elements, state.fitted)


def line(step: int, group: str, elements: int, fitted: Fitted) -> journal.Fit:
    edges, shares = fitted.curve()
    models = [
        journal.FittedModel(fit.model.name, _short(fit.distance), _shares(fit.model.above(edges)))
        for fit in fitted.fits
    ]
    return journal.Fit(
        step + 1,
        round(time.time(), 3),
        group,
        _short(max(0.0, 1.0 - fitted.nonzero / elements)),
        _short(fitted.mean),
        tuple([_short(edge) for edge in edges]),
        tuple([_short(share) for share in shares]),
        tuple(models),
    )


def _shares(above: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, ...]:
    return tuple([_short(max(0.0, float(share))) for share in above[:-1] - above[1:]])


def columns(run: GroupExchange) -> dict[str, Any]:
    """For `stats`: the closest model, and the distance of each as a share of the mean magnitude. Empty if nothing is known."""
    state = of(run)
    if state is None or state.fitted is None:
        return {}
    fits = state.fitted.fits
    return {
        "fit": {"step": state.fitted_at + 1, "best": fits[0].model.name, **{f.model.name: f.distance for f in fits}}
    }


def explained(rank_state: RankState) -> list[str]:
    """For `explain`: a sentence per group."""
    return [_sentence(run.info.name, found["fit"]) for run in rank_state.groups if (found := columns(run))]


def _sentence(group: str, fit: dict[str, Any]) -> str:
    words = ", ".join(f"{name} {fit[name]:.3f}" for name in fit if name not in ("step", "best"))
    closest = f"{group}: magnitudes are closest to {fit['best']}"
    return f"{closest} (Wasserstein distance over their mean, exchange {fit['step']}: {words})"


def _short(value: float) -> float:
    return float(f"{value:.5g}")
