"""`thinwire bench`: kernels against their limits, steps against every peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from ..codecs import CODECS
from ..lab.results import result, write
from .console import console, errors, failure, output

app = typer.Typer(
    name="bench",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure thinwire here: kernels against their limits, steps against every peer.",
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")]


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

    Example: thinwire bench kernels --elements 5e6 --codec 'micro(density=0.01)' --codec adacomp
    """
    if not 0.0 < density <= 1.0:
        raise failure(f"the density must be above 0 and at most 1, not {density}")
    from ..lab import bench_kernels

    with errors():
        chosen = [(text, ranks) for text in codec] if codec else bench_kernels.default_codecs(density, ranks)
        chosen = [(text, count) for text, count in chosen if text.split("(")[0] in CODECS or codec]
        total = bench_kernels.WARM_UP + repetitions
        with Progress(console=console) as progress:
            task = progress.add_task("rounds", total=total)
            rows = bench_kernels.run(
                int(elements), density, ranks, repetitions, chosen, lambda: progress.advance(task)
            )
        table = Table(title=f"{int(elements):,} elements, density {density:g}, one core, medians of {repetitions}")
        for column in ("codec", "ranks", "phase", "ms", "x add_", "faster than topk", "bits a place", "x entropy"):
            table.add_column(column, justify="left" if column in ("codec", "phase") else "right")
        for row in rows:
            bits = row["bits_per_selected"]
            table.add_row(
                row["codec"],
                str(row["ranks"]),
                row["phase"],
                f"{1000 * row['seconds']:.1f}",
                f"{row['ratio_to_add']:.2f}",
                f"{row['speedup_over_topk']:.1f}",
                f"{bits:.2f}" if bits else "",
                f"{bits / row['entropy_bits']:.3f}" if bits else "",
            )
        output.print(table)
        if json_file is not None:
            write(json_file, result("bench kernels", rows, {"repetitions": repetitions}))
