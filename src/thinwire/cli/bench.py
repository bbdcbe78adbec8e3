"""`thinwire bench`: kernel throughput, training steps compared with alternatives, predictions, accuracy on real data."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ..lab.netns import format_rate
from ..lab.results import write
from . import planning
from .console import JsonFile, can_be_drawn, console, errors, failure, number, output, progress, show
from .converge import converge

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Benchmarks on this machine: kernels, training steps against alternatives, predictions, accuracy on real data.",
)

app.command()(converge)


@app.command()
def kernels(
    elements: Annotated[float, typer.Option(help="Size of the gradient.", min=1000)] = 25e6,
    density: Annotated[float, typer.Option(help="Share of elements that sparse codecs send.")] = 0.01,
    ranks: Annotated[
        int, typer.Option(help="Ranks that MiCRO divides its work among; messages to decode.", min=1)
    ] = 4,
    repetitions: Annotated[int, typer.Option(help="Measured rounds.", min=1)] = 9,
    codec: Annotated[list[str] | None, typer.Option(help="Only this codec; may be given several times.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Encode and decode times of every codec on one core, relative to `residual.add_(gradient)` and to plain torch code.

    Also whole steps of local updates without communication, relative to `torch.optim.SGD(momentum=0.9, foreach=True)`.

    Example: thinwire bench kernels --elements 5e6 --codec 'micro(density=0.01)' --codec 'updates(randomblock(ratio=64), 0.3)'
    """
    if not 0.0 < density <= 1.0:
        raise failure(f"the density must be above 0 and at most 1, not {density}")
    from ..codecs import CODECS, parse
    from ..lab import bench_kernels
    from ..lab.method_spec import parse_updates

    with errors():
        updates = [text for text in codec or bench_kernels.UPDATES if parse_updates(text) is not None]
        codec = [text for text in codec if text not in updates] if codec else None
        for text in codec or ():
            parse(text)  # before gradients are made for it
        chosen = [] if codec == [] else bench_kernels.default_codecs(density, ranks)
        chosen = [(text, ranks) for text in codec] if codec else chosen
        chosen = [(text, count) for text, count in chosen if text.split("(")[0] in CODECS or codec]
        with progress("rounds", bench_kernels.WARM_UP + repetitions) as watcher:
            rows = bench_kernels.run(
                int(elements), density, ranks, repetitions, chosen, lambda: watcher.advance(1), updates
            )
        columns = ["codec", "ranks", "phase", "ms", "x add_", "beyond add_", "faster than topk"]
        columns += ["bits per place", "x entropy", "x SGD"]
        title = f"{int(elements):,} elements, density {density:g}, one core, medians of {repetitions}"
        cells = [
            (
                row["codec"],
                str(row["ranks"]),
                row["phase"],
                f"{1000 * row['seconds']:.1f}",
                f"{row['ratio_to_add']:.2f}",
                number(row["selection_seconds"], "{:.1f}", 1e-3),
                f"{row['speedup_over_topk']:.1f}",
                number(row["bits_per_selected"], "{:.2f}"),
                number(row["bits_per_selected"], "{:.3f}", row["entropy_bits"] or 1.0),
                number(row["ratio_to_sgd"], "{:.2f}"),
            )
            for row in rows
        ]
        show(title, columns, cells, left=("codec", "phase"), width=120)
        write(json_file, "bench kernels", rows, {"repetitions": repetitions})


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
    rounds: Annotated[int, typer.Option(help="Visits to every method.", min=1)] = 10,
    steps_per_round: Annotated[int, typer.Option(help="Steps per visit.", min=1)] = 3,
    warm_up: Annotated[int, typer.Option(help="Steps of every codec before measurements begin.", min=4)] = 60,
    bucket_mb: Annotated[float | None, typer.Option(help="Size of DDP's buckets; default: DDP's own.")] = None,
    bucket_view: Annotated[
        bool,
        typer.Option(help="Whether every DDP uses gradient_as_bucket_view, which saves a copy."),
    ] = True,
    momentum: Annotated[
        float, typer.Option(help="Momentum of the SGD optimizer of every method.", min=0.0, max=0.999)
    ] = 0.0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time over rate to this .svg, .png or .pdf.", callback=can_be_drawn)
    ] = None,
) -> None:
    """Training steps with thinwire's codecs and with the alternatives that torch offers, over the same emulated links.

    All methods take turns in the same processes. A step is forward, backward and optimizer; the slowest rank counts. Bytes
    are read from the nodes' interface counters.

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
        sizes = planning.numbers(nodes)
        rows, memory = [], []
        with progress("visits", bench_step.total_visits(options, len(sizes))) as watcher:
            for size in sizes:
                run = bench_step.run(size, options, watcher)
                rows += bench_step.rows(run, options)
                memory.append(run.peak_memory_bytes)
        _show_steps(rows)
        for row in rows:
            if row["explained"]:
                output.print(escape(f"{row['method']} at {row['rate']}: {row['explained']}"), soft_wrap=True)
        console.print(f"peak memory of a rank with all methods: {max(memory) / 1e9:.2f} GB")
        names = ("rounds", "steps_per_round", "bucket_mb", "bucket_view", "momentum")
        settings = {name: getattr(options, name) for name in names}
        write(json_file, "bench step", rows, {**settings, "peak_memory_bytes": memory})
        if plot is not None:
            bench_step.plot(plot, rows)


@app.command()
def predict(
    workloads: Annotated[
        str, typer.Option("--workload", "--workloads", help="Out of gpt, gpt-small, vgg, resnet, lstm.")
    ] = "gpt,vgg",
    nodes: Annotated[
        int, typer.Option(help="Emulated machines; with more nodes than cores, times measure the scheduler.", min=2)
    ] = 2,
    rates: Annotated[str, typer.Option(help="Rates of the links.")] = "1gbit,100mbit",
    plans: Annotated[int, typer.Option(help="Random plans per workload.", min=2)] = 20,
    rounds: Annotated[int, typer.Option(help="Visits to every plan at each rate.", min=1)] = 3,
    steps_per_round: Annotated[int, typer.Option(help="Steps per visit.", min=1)] = 2,
    warm_up: Annotated[int, typer.Option(help="Steps of every plan before measurements begin.", min=4)] = 8,
    budget: Annotated[float, typer.Option(help="Seconds for measuring a profile.", min=1)] = 40.0,
    seed: Annotated[int, typer.Option(help="Seed of the random plans.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Compare predicted with measured step times of random plans: the accuracy of the planner.

    The profile is measured in the same emulated cluster before the plans run. A step is forward, backward and optimizer;
    the slowest rank counts; medians.

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
        with progress("visits", sum(bench_predict.total_visits(options) for options in runs)) as watcher:
            for options in runs:
                rows += bench_predict.rows(bench_predict.run(options, watcher))
        summary = bench_predict.summary(rows)
        _show_predictions(rows, summary)
        settings = {"rounds": rounds, "steps_per_round": steps_per_round, "warm_up": warm_up, "seed": seed}
        write(json_file, "bench predict", rows, {**summary, **settings})


def _show_predictions(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    for place in dict.fromkeys((row["workload"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["workload"], row["rate"]) == place]
        title = f"{place[0]}, {chosen[0]['nodes']} nodes, rate {place[1]}"
        cells = [
            (
                str(row["plan"]),
                f"{1000 * row['predicted_seconds']:.1f}",
                f"{1000 * row['measured_seconds']:.1f}",
                f"{100 * row['error']:+.1f} %",
                row["description"],
            )
            for row in chosen
        ]
        show(title, ("plan", "predicted ms", "measured ms", "error", "groups"), cells, left=("groups",), width=120)
    output.print(
        f"{summary['plans']} plans and rates: mean absolute error {100 * summary['mean_absolute_error']:.1f} %, rank "
        f"correlation {summary['rank_correlation']:.3f}, predictions span {summary['span']:.1f}x"
    )


def _show_steps(rows: list[dict[str, Any]]) -> None:
    for place in dict.fromkeys((row["nodes"], row["rate"]) for row in rows):
        chosen = [row for row in rows if (row["nodes"], row["rate"]) == place]
        first = chosen[0]
        rate = f"rate {first['rate']}"
        if first["measured_rate"]:
            rate += f" (measured {format_rate(first['measured_rate'])}{'' if first['calibrated'] else ', OFF'})"
        cores = (
            "at least one core per node" if first["pinned"] else "fewer cores than nodes: times measure the scheduler"
        )
        columns = (
            "method",
            "ms per step",
            "95 %",
            "x ceiling",
            "fp32 / it",
            "recovered",
            "MB sent",
            "by stats",
            "ratio",
            "CPU ms",
        )
        title = f"{first['workload']}, {first['nodes']} nodes, {rate}, {cores}"
        cells = [
            (
                row["method"],
                f"{1000 * row['seconds']:.1f}",
                f"{1000 * row['ci_low']:.0f}-{1000 * row['ci_high']:.0f}",
                number(row["ratio_to_ceiling"], "{:.3f}"),
                number(row["ratio_to_fp32"] and 1 / row["ratio_to_fp32"], "{:.2f}"),
                number(row["recovered"], "{:.3f}"),
                number(row["bytes_per_rank"], "{:.3f}", 1e6),
                number(row["expected_bytes_per_rank"], "{:.3f}", 1e6),
                number(row["payload_ratio_to_expected"], "{:.3f}"),
                f"{1000 * row['cpu_seconds']:.1f}",
            )
            for row in chosen
        ]
        show(title, columns, cells, left=("method",), width=120)
