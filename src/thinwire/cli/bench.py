"""`thinwire bench`: kernels against their limits, steps against every peer, predictions, accuracy on real data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..codecs import CODECS, parse
from ..lab.methods import updates_of
from ..lab.netns import format_rate
from ..lab.results import result, write
from .console import JsonFile, can_be_drawn, console, errors, failure, output
from .converge import converge

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure thinwire here: kernels against their limits, steps against every peer, predictions, accuracy on data.",
)

app.command()(converge)


@app.command()
def kernels(
    elements: Annotated[float, typer.Option(help="Size of the gradient.", min=1000)] = 25e6,
    density: Annotated[float, typer.Option(help="Share of elements that sparse codecs send.")] = 0.01,
    ranks: Annotated[int, typer.Option(help="Ranks that MiCRO shares its work among; messages to decode.", min=1)] = 4,
    repetitions: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 9,
    codec: Annotated[list[str] | None, typer.Option(help="Only this codec; may be given several times.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Encode and decode of every codec, beside `residual.add_(gradient)` and what a user would write, on one core.

    And whole steps of local updates without the wire, beside those of `torch.optim.SGD(momentum=0.9, foreach=True)`.

    Example: thinwire bench kernels --elements 5e6 --codec 'micro(density=0.01)' --codec 'updates(randomblock(ratio=64), 0.3)'
    """
    if not 0.0 < density <= 1.0:
        raise failure(f"the density must be above 0 and at most 1, not {density}")
    from ..lab import bench_kernels

    with errors():
        updates = [text for text in codec or bench_kernels.UPDATES if updates_of(text) is not None]
        codec = [text for text in codec if text not in updates] if codec else None
        for text in codec or ():
            parse(text)  # before gradients are made for it
        chosen = [] if codec == [] else bench_kernels.default_codecs(density, ranks)
        chosen = [(text, ranks) for text in codec] if codec else chosen
        chosen = [(text, count) for text, count in chosen if text.split("(")[0] in CODECS or codec]
        total = bench_kernels.WARM_UP + repetitions
        with Progress(console=console) as progress:
            task = progress.add_task("rounds", total=total)
            rows = bench_kernels.run(
                int(elements), density, ranks, repetitions, chosen, lambda: progress.advance(task), updates
            )
        table = Table(title=f"{int(elements):,} elements, density {density:g}, one core, medians of {repetitions}")
        for column in (
            "codec",
            "ranks",
            "phase",
            "ms",
            "x add_",
            "beyond add_",
            "faster than topk",
            "bits a place",
            "x entropy",
            "x SGD",
        ):
            table.add_column(column, justify="left" if column in ("codec", "phase") else "right")
        for row in rows:
            bits = row["bits_per_selected"]
            table.add_row(
                row["codec"],
                str(row["ranks"]),
                row["phase"],
                f"{1000 * row['seconds']:.1f}",
                f"{row['ratio_to_add']:.2f}",
                _number(row["selection_seconds"] and 1000 * row["selection_seconds"], "{:.1f}"),
                f"{row['speedup_over_topk']:.1f}",
                f"{bits:.2f}" if bits else "",
                f"{bits / row['entropy_bits']:.3f}" if bits else "",
                _number(row["ratio_to_sgd"], "{:.2f}"),
            )
        output.print(table)
        if json_file is not None:
            write(json_file, result("bench kernels", rows, {"repetitions": repetitions}))


@app.command()
def step(
    workload: Annotated[str, typer.Option(help="gpt, gpt-small, vgg, resnet or lstm.")] = "gpt",
    nodes: Annotated[str, typer.Option(help="Emulated machines; several numbers give one run each.")] = "2",
    ranks_per_node: Annotated[int, typer.Option(help="Processes on each of them.", min=1)] = 1,
    rates: Annotated[str, typer.Option(help="Rates of the links, in this order.")] = "100mbit,1gbit,none",
    methods: Annotated[
        str,
        typer.Option(
            help="Only these: none (no communication), noop (a hook that sends nothing), fp32 (plain DDP), fp16, bf16, "
            "powersgd1, powersgd4, int8-hook, topk-hook, texts of codecs, or local updates: updates(CODEC, STRENGTH, "
            "period=STEPS). @4 after one gives DDP buckets of 4 MB."
        ),
    ] = "all",
    rounds: Annotated[int, typer.Option(help="How often every method is visited.", min=1)] = 10,
    steps_per_round: Annotated[int, typer.Option(help="Steps of a visit.", min=1)] = 3,
    warm_up: Annotated[int, typer.Option(help="Steps of every codec before the first that is measured.", min=4)] = 60,
    bucket_mb: Annotated[float | None, typer.Option(help="Size of DDP's buckets; default: that of DDP.")] = None,
    bucket_view: Annotated[
        bool,
        typer.Option(help="Every DDP with gradient_as_bucket_view, which saves it a copy, or every one without."),
    ] = True,
    momentum: Annotated[
        float, typer.Option(help="Of the SGD that every method steps with.", min=0.0, max=0.999)
    ] = 0.0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time over rate to this .svg, .png or .pdf.", callback=can_be_drawn)
    ] = None,
) -> None:
    """Training steps of thinwire's codecs and of what a user would pick instead, over the same emulated links.

    All methods take turns in the same processes. A step is forward, backward and optimizer; the slowest rank counts. Bytes
    are those that the nodes' interfaces counted.

    Examples:

    thinwire bench step --rates 1gbit --methods "none,fp32,fp16,micro(density=0.01)"

    thinwire bench step --rates 100mbit --methods "none,updates(randomblock(ratio=64), 0.3, period=8)"

    thinwire bench step --workload gpt-small --nodes 2,4,8,16 --rates none --methods "fp32,topk-hook,micro" --rounds 2
    """
    from ..lab import bench_step

    with errors():
        options = bench_step.Options(
            workload=workload,
            ranks_per_node=ranks_per_node,
            rates=tuple(bench_step.split(rates)),
            methods=bench_step.METHODS if methods == "all" else tuple(bench_step.split(methods)),
            rounds=rounds,
            steps_per_round=steps_per_round,
            warm_up=warm_up,
            bucket_mb=bucket_mb,
            bucket_view=bucket_view,
            momentum=momentum,
        )
        bench_step.check(options)
        sizes = _numbers(nodes)
        rows, memory = [], []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("visits", total=bench_step.total_visits(options, len(sizes)))
            watcher = bench_step.Watcher(
                tell=lambda text: progress.console.print(escape(text), soft_wrap=True),
                visits=lambda count: progress.advance(task, count),
            )
            for size in sizes:
                run = bench_step.run(size, options, watcher)
                rows += bench_step.rows(run, options)
                memory.append(run.peak_memory_bytes)
        _show_steps(rows)
        for row in rows:
            if row["explained"]:
                output.print(escape(f"{row['method']} at {row['rate']}: {row['explained']}"), soft_wrap=True)
        console.print(f"peak memory of a rank, all methods together: {max(memory) / 1e9:.2f} GB")
        if json_file is not None:
            summary = {
                "rounds": rounds,
                "steps_per_round": steps_per_round,
                "bucket_mb": bucket_mb,
                "bucket_view": bucket_view,
                "momentum": momentum,
            }
            write(json_file, result("bench step", rows, {**summary, "peak_memory_bytes": memory}))
        if plot is not None:
            bench_step.plot(plot, rows)


@app.command()
def predict(
    workloads: Annotated[
        str, typer.Option("--workload", "--workloads", help="Out of gpt, gpt-small, vgg, resnet, lstm.")
    ] = "gpt,vgg",
    nodes: Annotated[
        int, typer.Option(help="Emulated machines; more than there are cores measure the scheduler.", min=2)
    ] = 2,
    rates: Annotated[str, typer.Option(help="Rates of the links.")] = "1gbit,100mbit",
    plans: Annotated[int, typer.Option(help="Random plans of each workload.", min=2)] = 20,
    rounds: Annotated[int, typer.Option(help="How often every plan is visited at each rate.", min=1)] = 3,
    steps_per_round: Annotated[int, typer.Option(help="Steps of a visit.", min=1)] = 2,
    warm_up: Annotated[int, typer.Option(help="Steps of every plan before the first that is measured.", min=4)] = 8,
    budget: Annotated[float, typer.Option(help="Seconds for the measurements of a profile.", min=1)] = 40.0,
    seed: Annotated[int, typer.Option(help="Of the random plans.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Predicted and measured steps of random plans: how far the planner's arithmetic can be trusted.

    The profile is measured in the same emulated cluster, before and apart from the plans. A step is forward, backward and
    optimizer; the slowest rank counts; medians.

    Example: thinwire bench predict --workloads gpt --rates 1gbit --plans 10
    """
    from ..lab import bench_predict, bench_step

    with errors():
        runs = [
            bench_predict.Options(
                workload=workload,
                nodes=nodes,
                rates=tuple(bench_step.split(rates)),
                plans=plans,
                seed=seed,
                rounds=rounds,
                steps_per_round=steps_per_round,
                warm_up=warm_up,
                budget=budget,
            )
            for workload in bench_step.split(workloads)
        ]
        for options in runs:
            bench_predict.check(options)
        rows: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("visits", total=sum(bench_predict.total_visits(options) for options in runs))
            watcher = bench_predict.Watcher(
                tell=lambda text: progress.console.print(escape(text), soft_wrap=True),
                visits=lambda count: progress.advance(task, count),
            )
            for options in runs:
                rows += bench_predict.rows(bench_predict.run(options, watcher))
        summary = bench_predict.summary(rows)
        _show_predictions(rows, summary)
        if json_file is not None:
            settings = {"rounds": rounds, "steps_per_round": steps_per_round, "warm_up": warm_up, "seed": seed}
            write(json_file, result("bench predict", rows, {**summary, **settings}))


def _show_predictions(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    for place in dict.fromkeys((row["workload"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["workload"], row["rate"]) == place]
        table = Table(title=f"{place[0]}, {chosen[0]['nodes']} nodes, rate {place[1]}", title_justify="left")
        for column in ("plan", "predicted ms", "measured ms", "error", "groups"):
            table.add_column(column, justify="left" if column == "groups" else "right", no_wrap=True)
        for row in chosen:
            table.add_row(
                str(row["plan"]),
                f"{1000 * row['predicted_seconds']:.1f}",
                f"{1000 * row['measured_seconds']:.1f}",
                f"{100 * row['error']:+.1f} %",
                row["description"],
            )
        (output if output.is_terminal else Console(highlight=False, width=120)).print(table)
    output.print(
        f"{summary['plans']} plans and rates: mean absolute error {100 * summary['mean_absolute_error']:.1f} %, rank "
        f"correlation {summary['rank_correlation']:.3f}, predictions span {summary['span']:.1f}x"
    )


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise failure(f"{text!r} is not a list of numbers: write --nodes 2, or --nodes 2,4,8") from None


def _show_steps(rows: list[dict[str, Any]]) -> None:
    for place in dict.fromkeys((row["nodes"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["nodes"], row["rate"]) == place]
        first = chosen[0]
        rate = f"rate {first['rate']}"
        if first["measured_rate"]:
            rate += f" (measured {format_rate(first['measured_rate'])}{'' if first['calibrated'] else ', OFF'})"
        cores = "one core a node or more" if first["pinned"] else "fewer cores than nodes: times are the scheduler's"
        table = Table(title=f"{first['workload']}, {first['nodes']} nodes, {rate}, {cores}", title_justify="left")
        for column in (
            "method",
            "ms a step",
            "95 %",
            "x ceiling",
            "fp32 / it",
            "recovered",
            "MB sent",
            "by stats",
            "ratio",
            "CPU ms",
        ):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for row in chosen:
            table.add_row(
                row["method"],
                f"{1000 * row['seconds']:.1f}",
                f"{1000 * row['ci_low']:.0f}-{1000 * row['ci_high']:.0f}",
                _number(row["ratio_to_ceiling"], "{:.3f}"),
                _number(row["ratio_to_fp32"] and 1 / row["ratio_to_fp32"], "{:.2f}"),
                _number(row["recovered"], "{:.3f}"),
                _number(row["bytes_per_rank"], "{:.3f}", 1e6),
                _number(row["expected_bytes_per_rank"], "{:.3f}", 1e6),
                _number(row["payload_ratio_to_expected"], "{:.3f}"),
                f"{1000 * row['cpu_seconds']:.1f}",
            )
        # Squeezed into 80 columns it could not be read; a file or a pipe has no width.
        (output if output.is_terminal else Console(highlight=False, width=120)).print(table)


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "" if value is None else form.format(value / unit)
