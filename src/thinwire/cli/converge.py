"""`thinwire bench converge`: accuracy on real data."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..lab.bench_step import split
from ..lab.results import result, write
from .console import JsonFile, can_be_drawn, console, errors, failure, output

UNFINISHED = 75  # EX_TEMPFAIL: the same command goes on

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def converge(
    data: Annotated[Path, typer.Option(help="The directory with mnist.npz, cifar10.npz, tinyshakespeare.txt, ...")],
    workload: Annotated[
        str, typer.Option(help="mnist-cnn, cifar-resnet, shakespeare-lstm, shakespeare-gpt or wikitext-lstm.")
    ] = "mnist-cnn",
    method: Annotated[
        str,
        typer.Option(
            help="With commas: texts of codecs, dense, fp16, powersgd4, or local updates: updates(CODEC, STRENGTH, "
            "period=STEPS). @lr=0.02 after one gives it a learning rate of its own. With --rate also fp32 (plain DDP), "
            "DDP's own hooks by the names of `bench step`, files with plans, auto, and auto@FILE.json, which keeps its plan."
        ),
    ] = "dense,micro(density=0.01),laplace(density=0.01),adacomp",
    workers: Annotated[str, typer.Option(help="Workers; several numbers give all runs with each.")] = "4",
    seeds: Annotated[int, typer.Option(help="Runs of every method.", min=1)] = 3,
    results: Annotated[Path, typer.Option(help="Where runs are kept: complete ones are not repeated.")] = Path(
        "results"
    ),
    epochs: Annotated[float | None, typer.Option(help="Times over the training data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Of all workers together.", min=1)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of all methods.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Of the learning rate: cosine, steps or constant.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a worker's gradient, before feedback.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Tensors that travel whole, as '*.bias'.")] = None,
    min_elements: Annotated[int, typer.Option(help="Smaller tensors travel whole.", min=0)] = 1024,
    by_layer: Annotated[bool, typer.Option(help="Tell compression rates by kind of layer.")] = False,
    evaluations: Annotated[int, typer.Option(help="In each run.", min=1)] = 6,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Stop after so long, with exit code 75; the same command goes on.")
    ] = None,
    save_seconds: Annotated[float, typer.Option(help="Time between checkpoints.")] = 20.0,
    rate: Annotated[
        str | None, typer.Option(help="Real processes, one a node, over links of this rate: time to accuracy.")
    ] = None,
    target: Annotated[float | None, typer.Option(help="With --rate: the value to reach, as 0.97.")] = None,
    nodes: Annotated[int, typer.Option(help="With --rate: emulated machines.", min=1)] = 2,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw loss over steps, bytes and time to this .svg, .png or .pdf.", callback=can_be_drawn),
    ] = None,
) -> None:
    """Train the same model on the same data with every method, and compare with dense.

    Data order, first weights and learning rates are the same for all. Workers live in one process, with the codecs, the
    feedback and the sums of real jobs. Runs are kept: a command that was killed goes on where it was.

    Examples:

    thinwire bench converge --data DIR --method "dense,adacomp,micro(density=0.01)" --seeds 3

    thinwire bench converge --data DIR --workers 8 --method "dense,updates(randomblock(ratio=64), 0.3)" --schedule steps

    thinwire bench converge --data DIR --rate 100mbit --target 0.97 --method "fp32,fp16,powersgd4,micro(density=0.01)"
    """
    end = time.monotonic() + limit_seconds if limit_seconds is not None else math.inf
    with errors(), _in_time():
        recipe: dict[str, Any] = {"epochs": epochs, "batch": batch_size, "lr": lr, "schedule": schedule, "clip": clip}
        if epochs is not None and steps is not None:
            raise failure("give either --epochs or --steps")
        for name, value in (("--epochs", epochs), ("--lr", lr), ("--clip", clip)):
            if value is not None and not value > 0:
                raise failure(f"{name} must be above 0, not {value}")
        recipe["steps"] = steps
        common = (data, workload, split(method), seeds, recipe)
        if rate is not None:
            if target is None:
                raise failure("--rate asks for the time to a --target, as in --target 0.97")
            _timed(*common, rate, target, nodes, results, end, json_file)
            return
        if target is not None:
            raise failure("--target belongs to --rate, as in --rate 100mbit --target 0.97")
        counts = _counts(workers)
        from ..lab import converge as runs
        from ..lab import converge_tables
        from ..lab.contest import Exceptions

        exceptions = Exceptions(tuple(exclude or ()), min_elements, by_layer)
        options = [
            runs.Options(
                workload, tuple(split(method)), data, results, count, seeds, evaluations, recipe, exceptions,
                save_seconds, end,
            )
            for count in counts
        ]  # fmt: skip
        outcomes = []
        lines: list[dict[str, Any]] = []
        with Progress(*COLUMNS, console=console) as progress:
            planned = [runs.specs(each) for each in options]
            total = sum(spec.task.recipe.steps for each in planned for spec in each)
            task = progress.add_task("steps", total=total)
            watcher = runs.Watcher(
                tell=lambda text: progress.console.print(escape(text), soft_wrap=True),
                steps=lambda count: progress.advance(task, count),
            )
            for each, own in zip(options, planned, strict=True):
                found = runs.run(each, watcher, own)
                references = [runs.reference_of(each, spec) for spec in own]
                outcomes += found
                rows = [outcome["row"] for outcome in found]
                lines += converge_tables.summarise(rows, [ref["row"] for ref in references if ref is not None])
        _show(lines)
        if json_file is not None:
            content = result("bench converge", [outcome["row"] for outcome in outcomes], {"methods": lines})
            write(json_file, content)
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


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise failure(f"{text!r} is not a number of workers: write --workers 4, or --workers 4,8,16") from None


def _timed(
    data: Path,
    workload: str,
    methods: list[str],
    seeds: int,
    recipe: dict[str, Any],
    rate: str,
    target: float,
    nodes: int,
    results: Path,
    end: float,
    json_file: Path | None,
) -> None:
    from ..lab import converge_time

    options = converge_time.Options(workload, tuple(methods), data, rate, target, nodes, seeds, recipe, results, end)
    converge_time.check(options)
    with Progress(*COLUMNS, console=console) as progress:
        task = progress.add_task("runs", total=len(methods) * seeds)
        rows = converge_time.run(
            options,
            lambda text: progress.console.print(escape(text), soft_wrap=True),
            lambda count: progress.advance(task, count),
        )
    table = Table(title=f"{workload}, {nodes} nodes, {rate}: time to {target:g}", title_justify="left")
    for column in (
        "method",
        "seed",
        "seconds",
        "of it set-up",
        "planning",
        "fp32 / it",
        "steps",
        "ms a step",
        "MB a step",
        "value",
    ):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            str(row["seed"]),
            _number(row["seconds_to_target"], "{:.1f}") or "not reached",
            f"{row['setup_seconds']:.1f}",
            _number(row.get("planning_seconds"), "{:.1f}"),
            _number(row["speedup_over_fp32"], "{:.2f}"),
            str(row["steps"]),
            f"{1000 * row['seconds'] / row['steps']:.1f}",
            _number(row["bytes_per_rank"], "{:.3f}", 1e6),
            f"{row['value']:.4f}",
        )
    _wide().print(table)
    if json_file is not None:
        summary = {"rate": rate, "target": target, "nodes": nodes}
        write(json_file, result("bench converge", rows, summary))


def _show(lines: list[dict[str, Any]]) -> None:
    first = lines[0] if lines else {"workload": "", "metric": ""}
    table = Table(title=f"{first['workload']}, {first['metric']}", title_justify="left")
    kinds = sorted({name for line in lines for name in line if name.startswith("rate_")})
    names = ["method", "workers", "runs", "mean", "spread", "to dense", "std. error", "times smaller"]
    names += ["MB on the link", "in the mean", *(f"{kind.removeprefix('rate_')} x" for kind in kinds)]
    for column in names:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for line in lines:
        shared = f" (shared {line['mean_shared']:.4f})" if line["mean_shared"] is not None else ""
        table.add_row(
            line["method"],
            str(line["workers"]),
            f"{line['runs']}" + (f", {line['diverged']} diverged" if line["diverged"] else ""),
            _number(line["mean"], "{:.4f}") + shared,
            _number(line["spread"], "{:.4f}"),
            _number(line["difference"], "{:+.4f}"),
            _number(line["standard_error"], "{:.4f}"),
            _number(line["compression_rate"], "{:.1f}"),
            _number(line["traffic_per_rank"], "{:.4f}", 1e6),
            _number(line["density"], "{:.4f}"),
            *(_number(line.get(kind), "{:.0f}") for kind in kinds),
        )
    _wide().print(table)


def _wide() -> Console:
    # Squeezed into 80 columns it could not be read; a file or a pipe has no width.
    return output if output.is_terminal else Console(highlight=False, width=180)


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else form.format(value / unit)
