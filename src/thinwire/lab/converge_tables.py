"""Statistics over runs: mean and spread over seeds, paired difference to dense, plots."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plots import figure
from .trainers import REFERENCE

Row = dict[str, Any]


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds."""
    return statistics.stdev(values) if len(values) > 1 else None


def differences(rows: Sequence[Row], references: dict[int, Row], key: str = "value") -> list[float]:
    """Paired differences to dense by seed; runs with the same seed share data order and initial weights."""
    pairs = [(row[key], references[row["seed"]]["value"]) for row in rows if row["seed"] in references]
    return [own - dense for own, dense in pairs if own is not None and dense is not None]


def summarise(rows: Sequence[Row], references: Sequence[Row] = ()) -> list[Row]:
    """One flat row per method, in order of appearance; `references` are dense runs."""
    dense = {row["seed"]: row for row in [*references, *(row for row in rows if row["method"] == REFERENCE)]}
    found = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        values = [row["value"] for row in own if row["value"] is not None]
        apart = differences(own, dense)
        deviation = spread(apart)
        first = own[0]
        line = {
            "workload": first["workload"],
            "method": method,
            "workers": first["workers"],
            "metric": first["metric"],
            "runs": len(own),
            "diverged": sum(bool(row["diverged"]) for row in own),
            "mean": statistics.fmean(values) if values else None,
            "spread": spread(values),
            "difference": statistics.fmean(apart) if apart and method != REFERENCE else None,
            "standard_error": deviation / math.sqrt(len(apart))
            if deviation is not None and method != REFERENCE
            else None,
        }
        shared = [row["value_shared"] for row in own if row.get("value_shared") is not None]
        line["mean_shared"] = statistics.fmean(shared) if shared else None
        names = [name for name in first if name.startswith("rate_")]
        for name in (
            "bytes_per_rank",
            "traffic_per_rank",
            "compression_rate",
            "density",
            "residual_norm",
            "seconds",
            *names,
        ):
            numbers = [row[name] for row in own if row.get(name) is not None]
            line[name] = statistics.fmean(numbers) if numbers else None
        found.append(line)
    return found


def plot(path: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """Training loss over steps, bytes and time, and density over steps; one line per method, first seed only."""
    panels = {
        "step": ("steps", "loss"),
        "link_bytes": ("bytes on the link of a rank", "loss"),
        "seconds": ("seconds of training", "loss"),
        "support": ("steps", "fraction of elements in the mean"),
    }
    with figure(path, 13, 8) as drawn:
        for axes, (key, (below, beside)) in zip(drawn.subplots(2, 2).flat, panels.items(), strict=True):
            for outcome in _firsts(outcomes):
                row, trace = outcome["row"], outcome["trace"]
                x, y = ("step", "support") if key == "support" else (key, "loss")
                points = [(point[x], point[y]) for point in trace if point[x] is not None and point[y] is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), label=f"{row['method']}, {row['workers']} workers")
            axes.set(xlabel=below, ylabel=beside, yscale="log", xscale="log" if key == "link_bytes" else "linear")
        drawn.axes[0].legend(fontsize="small")


def plot_build_up(path: Path, rows: Sequence[Row]) -> None:
    """Density of the mean over the number of workers, one line per method."""
    with figure(path, 7, 5) as drawn:
        axes = drawn.subplots()
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method and row["density"]]
            points = sorted((row["workers"], row["density"]) for row in own)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=method)
        workers = sorted({row["workers"] for row in rows})
        axes.set(xlabel="workers", ylabel="fraction of elements in the mean", yscale="log", xscale="log")
        axes.set_xticks(workers, [str(count) for count in workers])
        axes.minorticks_off()
        axes.legend()


def _firsts(outcomes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for outcome in outcomes:
        found.setdefault((outcome["row"]["method"], outcome["row"]["workers"]), outcome)
    return list(found.values())
