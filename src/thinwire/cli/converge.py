"""`thinwire bench converge`: accuracy on real data."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..lab.results import write
from . import planning
from .console import JsonFile, can_be_drawn, console, errors, failure, number, progress, show

if TYPE_CHECKING:
    from ..lab.converge_time import Options

UNFINISHED = 75  # EX_TEMPFAIL: repeating the command continues the runs


def converge(
    data: Annotated[Path, typer.Option(help="The directory with mnist.npz, cifar10.npz, tinyshakespeare.txt, ...")],
    workload: Annotated[
        str, typer.Option(help="mnist-cnn, cifar-resnet, shakespeare-lstm, shakespeare-gpt or wikitext-lstm.")
    ] = "mnist-cnn",
    method: Annotated[
        str,
        typer.Option(
            help="With commas: texts of codecs, dense, fp16, powersgd4, or local updates: updates(CODEC, STRENGTH, "
            "period=STEPS). @lr=0.02 after one sets its learning rate. With --rate also fp32 (plain DDP), "
            "the DDP hooks of `bench step`, plan files, auto, and auto@FILE.json, which keeps its plan in a file."
        ),
    ] = "dense,micro(density=0.01),laplace(density=0.01),adacomp",
    workers: Annotated[str, typer.Option(help="Workers; several numbers give all runs with each.")] = "4",
    seeds: Annotated[int, typer.Option(help="Runs per method, each with another seed.", min=1)] = 3,
    results: Annotated[Path, typer.Option(help="Directory of runs; complete ones are not repeated.")] = Path(
        "results"
    ),
    epochs: Annotated[float | None, typer.Option(help="Passes over the training data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per step of all workers together.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of all methods.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Learning rate schedule: cosine, steps or constant.")] = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest norm of a worker's gradient, before error feedback.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Tensors that are not compressed, as '*.bias'.")] = None,
    min_elements: Annotated[int, typer.Option(help="Smaller tensors are not compressed.", min=0)] = 1024,
    by_layer: Annotated[bool, typer.Option(help="Report compression rates by kind of layer.")] = False,
    evaluations: Annotated[int, typer.Option(help="Evaluations per run.", min=1)] = 6,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Stop after this time with exit code 75; repeating the command continues.")
    ] = None,
    save_seconds: Annotated[float, typer.Option(help="Time between checkpoints.")] = 20.0,
    rate: Annotated[
        str | None,
        typer.Option(help="Measure time to accuracy: real processes, one per node, over links of this rate."),
    ] = None,
    target: Annotated[float | None, typer.Option(help="With --rate: the value to reach, as 0.97.")] = None,
    nodes: Annotated[int, typer.Option(help="With --rate: emulated machines.", min=1)] = 2,
    fits: Annotated[
        bool,
        typer.Option(help="Report how the magnitudes that laplace selects from are distributed, instead of accuracy."),
    ] = False,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw loss over steps, bytes and time to this .svg, .png or .pdf.", callback=can_be_drawn),
    ] = None,
) -> None:
    """Train the same model on the same data with every method, and compare with dense.

    Data order, initial weights and learning rates are the same for all. Workers live in one process, with the codecs,
    error feedback and reductions of real jobs. A command that was interrupted continues from its last checkpoint.

    Examples:

    thinwire bench converge --data DIR --method "dense,adacomp,micro(density=0.01)" --seeds 3

    thinwire bench converge --data DIR --workers 8 --method "dense,updates(randomblock(ratio=64), 0.3)" --schedule steps

    thinwire bench converge --data DIR --rate 100mbit --target 0.97 --method "fp32,fp16,powersgd4,micro(density=0.01)"
    """
    from ..lab import converge as runs
    from ..lab import converge_tables, converge_time
    from ..lab.bench_step import split
    from ..lab.trainers import Exclusions

    end = time.monotonic() + limit_seconds if limit_seconds is not None else math.inf
    with errors(), _in_time():
        recipe: dict[str, Any] = {"epochs": epochs, "batch": batch_size, "lr": lr, "schedule": schedule, "clip": clip}
        if epochs is not None and steps is not None:
            raise failure("give either --epochs or --steps")
        for name, value in (("--epochs", epochs), ("--lr", lr), ("--clip", clip)):
            if value is not None and not value > 0:
                raise failure(f"{name} must be above 0, not {value}")
        recipe["steps"] = steps
        methods = tuple(split(method))
        if fits and (rate is not None or plot is not None):
            raise failure("--fits goes with neither --rate nor --plot")
        if rate is not None:
            if target is None:
                raise failure("--rate measures the time to a --target, as in --target 0.97")
            _timed(
                converge_time.Options(workload, methods, data, rate, target, nodes, seeds, recipe, results, end),
                json_file,
            )
            return
        if target is not None:
            raise failure("--target requires --rate, as in --rate 100mbit --target 0.97")
        counts = planning.numbers(workers, "--workers")
        exceptions = Exclusions(tuple(exclude or ()), min_elements, by_layer)
        options = [
            runs.Options(
                workload, methods, data, results, count, seeds, evaluations, recipe, exceptions, save_seconds, end
            )
            for count in counts
        ]
        outcomes = []
        lines: list[dict[str, Any]] = []
        planned = [runs.specs(each) for each in options]
        with progress("steps", sum(spec.task.recipe.steps for each in planned for spec in each)) as watcher:
            if fits:
                from ..lab import converge_fits

                rows = converge_fits.run([spec for each in planned for spec in each], watcher)
                _show_fits(rows)
                write(json_file, "bench converge", rows, {})
                return
            for each, own in zip(options, planned, strict=True):
                found = runs.run(each, watcher, own)
                references = [runs.reference_of(each, spec) for spec in own]
                outcomes += found
                rows = [outcome["row"] for outcome in found]
                lines += converge_tables.summarise(rows, [ref["row"] for ref in references if ref is not None])
        _show(lines)
        write(json_file, "bench converge", [outcome["row"] for outcome in outcomes], {"methods": lines})
        if plot is not None:
            converge_tables.plot(plot, outcomes)
            if len(counts) > 1:
                converge_tables.plot_build_up(plot.with_stem(f"{plot.stem}-workers"), lines)


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    from ..lab.converge import Unfinished

    try:
        yield
    except Unfinished as stop:
        console.print(escape(str(stop)), soft_wrap=True)
        raise typer.Exit(UNFINISHED) from None


def _timed(options: Options, json_file: Path | None) -> None:
    from ..lab import converge_time

    converge_time.check(options)
    with progress("runs", len(options.methods) * options.seeds) as watcher:
        rows = converge_time.run(options, watcher)
    columns = ["method", "seed", "seconds", "of it set-up", "planning", "fp32 / it", "steps", "ms per step"]
    columns += ["MB per step", "value"]
    title = f"{options.workload}, {options.nodes} nodes, {options.rate}: time to {options.target:g}"
    cells = [
        (
            row["method"],
            str(row["seed"]),
            number(row["seconds_to_target"], "{:.1f}") or "not reached",
            f"{row['setup_seconds']:.1f}",
            number(row.get("planning_seconds"), "{:.1f}"),
            number(row["speedup_over_fp32"], "{:.2f}"),
            str(row["steps"]),
            f"{1000 * row['seconds'] / row['steps']:.1f}",
            number(row["bytes_per_rank"], "{:.3f}", 1e6),
            f"{row['value']:.4f}",
        )
        for row in rows
    ]
    show(title, columns, cells, left=("method",), width=180)
    summary = {"rate": options.rate, "target": options.target, "nodes": options.nodes}
    write(json_file, "bench converge", rows, summary)


def _show_fits(rows: list[dict[str, Any]]) -> None:
    models = ("laplace", "gauss", "pareto")
    names = ["workload", "method", "step", "group", "elements", "zeros", *models, "closest"]
    cells = [
        (
            row["workload"],
            row["method"],
            str(row["step"]),
            row["group"],
            f"{row['elements']:,}",
            f"{100 * row['zeros']:.1f} %",
            *(f"{row[name]:.3f}" for name in models),
            row["closest"],
        )
        for row in rows
    ]
    show("Wasserstein distance over the mean magnitude", names, cells, left=("workload", "method"), width=180)


def _show(lines: list[dict[str, Any]]) -> None:
    first = lines[0] if lines else {"workload": "", "metric": ""}
    kinds = sorted({name for line in lines for name in line if name.startswith("rate_")})
    names = ["method", "workers", "runs", "mean", "spread", "to dense", "std. error", "times smaller"]
    names += ["MB on the link", "in the mean", *(f"{kind.removeprefix('rate_')} x" for kind in kinds)]
    cells = [
        (
            line["method"],
            str(line["workers"]),
            f"{line['runs']}" + (f", {line['diverged']} diverged" if line["diverged"] else ""),
            number(line["mean"], "{:.4f}") + number(line["mean_shared"], " (shared {:.4f})"),
            number(line["spread"], "{:.4f}"),
            number(line["difference"], "{:+.4f}"),
            number(line["standard_error"], "{:.4f}"),
            number(line["compression_rate"], "{:.1f}"),
            number(line["traffic_per_rank"], "{:.4f}", 1e6),
            number(line["density"], "{:.4f}"),
            *(number(line.get(kind), "{:.0f}") for kind in kinds),
        )
        for line in lines
    ]
    show(f"{first['workload']}, {first['metric']}", names, cells, left=("method",), width=180)
