"""`thinwire simulate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import PlanError
from ..lab.plots import figure
from ..lab.results import write
from ..planner import SEARCHES
from ..planner.network import NETWORKS, parse_bytes_per_second
from ..suggest import suggest
from . import planning
from .console import JsonFile, can_be_drawn, console, errors, progress, show


def simulate(
    profile: Annotated[Path | None, typer.Option(help="Profile of a measured job, see docs/planning.md.")] = None,
    model: Annotated[str, typer.Option(help="Or models of --profiles, on GPUs; a list with commas, or all.")] = "all",
    profiles: Annotated[Path | None, typer.Option(help="File of published backward profiles.")] = None,
    network: Annotated[str, typer.Option(help="pcie-25g, nvlink-100g, or both with a comma.")] = ",".join(NETWORKS),
    nodes: Annotated[str, typer.Option(help="Machines: 8, or 2,4,8, or 2..1024 for powers of two.")] = "8",
    gpus: Annotated[int, typer.Option(help="GPUs per machine.", min=1)] = 8,
    intra: Annotated[str, typer.Option(help="Rate of each GPU inside a machine, as in 300gbyte/s.")] = "",
    inter: Annotated[
        str, typer.Option(help="Rate between machines, as in 25gbit; with --profile a list with commas.")
    ] = "",
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Codec to simulate; may be repeated; a+b: choose between two. Default: dgc."),
    ] = None,
    density: Annotated[float, typer.Option(help="Share of elements that sparse codecs send.", min=1e-9, max=1)] = 0.01,
    search: Annotated[str, typer.Option(help="Searches, with commas.")] = ",".join(SEARCHES),
    cpu: Annotated[bool, typer.Option(help="Codecs may also run on the CPU.")] = False,
    max_compressions: Annotated[int, typer.Option(help="Most compressions of a tensor along its chain.", min=0)] = 4,
    forward: Annotated[float, typer.Option(help=planning.FORWARD_HELP, min=0)] = 0.0,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw step time over nodes to this .svg, .png or .pdf.", callback=can_be_drawn)
    ] = None,
) -> None:
    """Predict step times on another cluster, by every search, and compare them with the time without communication.

    Examples:

    thinwire simulate --profiles profiles.json --model bert_large --nodes 2..1024 --plot scaling.svg

    thinwire simulate --profile profile.json --nodes 2..64 --inter 1gbit,25gbit
    """
    with errors():
        sizes = planning.numbers(nodes)
        if profile is not None:
            rows = _measured(profile, sizes, inter)
        else:
            data = planning.published(profiles)
            models = list(data.models) if model == "all" else [name.strip() for name in model.split(",")]
            searches = [name.strip() for name in search.split(",")]
            for name in searches:
                if name not in SEARCHES:
                    raise PlanError(f"there is no search {name!r}; {suggest(name, SEARCHES)}")
            networks = network.split(",") if not (intra and inter) else [next(iter(NETWORKS))]
            simulations = [
                (text, planning.simulate(
                    data, name, text.split("+"), density, planning.network(net.strip(), size, gpus, intra, inter),
                    forward, cpu=cpu, max_compressions=max_compressions,
                ))
                for text in codec or ["dgc"] for net in networks for name in models for size in sizes
            ]  # fmt: skip
            planning.ready()
            rows = []
            with progress("searches", len(simulations) * len(searches)) as watcher:
                for text, simulation in simulations:
                    dense = simulation.search("fp32").seconds
                    for each in searches:
                        rows.append(planning.row(simulation, simulation.search(each), dense, text))
                        watcher.advance(1)
        _show(rows)
        if profile is None:
            console.print(planning.SOURCES, soft_wrap=True)
        write(json_file, "simulate", rows, {"forward_share": forward, "density": density, "cpu": cpu})
        if plot is not None:
            _plot(plot, rows)


def _measured(profile: Path, sizes: Sequence[int], inter: str) -> list[dict[str, Any]]:
    from ..planner.profile import Profile
    from ..planner.search import choose
    from ..planner.what_if import on_cluster

    job = Profile.load(profile)
    if not inter:
        raise PlanError("--profile needs --inter, the rate of the links of the other cluster, as in --inter 25gbit")
    planning.ready()
    rows = []
    for text in inter.split(","):
        for size in sizes:
            made = choose(on_cluster(job, size, parse_bytes_per_second(text)))
            row = planning.measured_row(made)
            codecs = dict.fromkeys(group.codec for group in made.groups)
            rows.append(
                {
                    **row,
                    "search_cpu_seconds": row["search_seconds"],
                    "network": f"{size}x1 {text.strip()}",
                    "codec": "+".join(codecs),
                }
            )
    return rows


def _show(rows: list[dict[str, Any]]) -> None:
    searches = list(dict.fromkeys(row["search"] for row in rows))
    names = [name for name in searches if name != "fp32"]
    columns = ("model", "network", "codec", "bound", "fp32", *names, "scaling")
    lines = []
    for key in dict.fromkeys((row["model"], row["network"], row["codec"]) for row in rows):
        mine = {row["search"]: row for row in rows if (row["model"], row["network"], row["codec"]) == key}
        first, last = next(iter(mine.values())), list(mine.values())[-1]
        bound, dense = f"{1e3 * first['bound_seconds']:.1f}", f"{1e3 * first['dense_seconds']:.1f}"
        lines.append([*key, bound, dense, *(_cell(mine[name]) for name in names), f"{last['scaling_factor']:.3f}"])
    show("milliseconds per step; in brackets the CPU time of the search", columns, lines, columns[:3], 180)


def _cell(row: dict[str, Any]) -> str:
    spent = row.get("search_cpu_seconds", row["search_seconds"])
    return f"{1e3 * row['predicted_seconds']:.1f} [{1e3 * spent:.0f}]"


def _plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Step time over nodes: a panel per model, a line per search and network."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    with figure(path, 7, 1 + 3.5 * len(models)) as drawn:
        for axes, model in zip(drawn.subplots(len(models), squeeze=False)[:, 0], models, strict=True):
            mine = [row for row in rows if row["model"] == model]
            links = [row["network"].split(" ", 1)[-1] for row in mine]
            for search, link, codec in dict.fromkeys(
                (row["search"], link, row["codec"]) for row, link in zip(mine, links, strict=True)
            ):
                points = {
                    row["nodes"]: 1e3 * row["predicted_seconds"]
                    for row, other in zip(mine, links, strict=True)
                    if (row["search"], other, row["codec"]) == (search, link, codec)
                }
                axes.plot(list(points), list(points.values()), marker="o", label=f"{search}, {codec}, {link}")
            axes.axhline(1e3 * mine[0]["bound_seconds"], color="grey", linestyle=":", label="no communication")
            axes.set(title=model, xlabel="nodes", ylabel="ms per step", xscale="log", yscale="log")
            sizes = sorted({row["nodes"] for row in mine})
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.legend(fontsize="x-small")
