"""`thinwire plan`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import PlanError
from ..lab.results import write
from ..planner import SLACK
from ..planner.network import parse_bytes_per_second
from . import planning
from .console import JsonFile, can_be_written, console, errors, output, show_table

if TYPE_CHECKING:
    from ..planner.plan import Plan, Quality
    from ..planner.profile import Profile
    from ..planner.simulation import Outcome, Simulation


def plan(
    profile: Annotated[Path | None, typer.Option(help="Profile of a measured job, see docs/planning.md.")] = None,
    model: Annotated[str | None, typer.Option(help="Or a model of --profiles, on GPUs.")] = None,
    profiles: Annotated[Path | None, typer.Option(help="File of published backward profiles.")] = None,
    network: Annotated[str, typer.Option(help="pcie-25g or nvlink-100g: link rates of a GPU cluster.")] = "pcie-25g",
    nodes: Annotated[int | None, typer.Option(help="Machines. Default: 8, or the number in --profile.", min=1)] = None,
    gpus: Annotated[int, typer.Option(help="GPUs per machine.", min=1)] = 8,
    intra: Annotated[str, typer.Option(help="Rate of each GPU inside a machine, as in 300gbyte/s.")] = "",
    inter: Annotated[str, typer.Option(help="Rate between machines, as in 100gbit.")] = "",
    codec: Annotated[
        list[str] | None,
        typer.Option(help="With --model: codecs to choose from; may be repeated. Default: dgc."),
    ] = None,
    density: Annotated[float, typer.Option(help="Share of elements that sparse codecs send.", min=1e-9, max=1)] = 0.01,
    search: Annotated[str, typer.Option(help="espresso, exact or joint; or fp32, all, myopic.")] = "joint",
    cpu: Annotated[bool, typer.Option(help="Codecs may also run on the CPU.")] = False,
    max_compressions: Annotated[int, typer.Option(help="Most compressions of a tensor along its chain.", min=0)] = 4,
    forward: Annotated[float, typer.Option(help=planning.FORWARD_HELP, min=0)] = 0.0,
    quality: Annotated[str, typer.Option(help="With --profile: lossless, high or fast.")] = "fast",
    slack: Annotated[
        float, typer.Option(help="With --profile: relative step time to give away for less loss.")
    ] = SLACK,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.", callback=can_be_written)] = None,
    json_file: JsonFile = None,
) -> None:
    """Plan a job: grouping of tensors, codec and chain of each group, and the predicted step time.

    Examples:

    thinwire plan --profile profile.json --quality high --out plan.json

    thinwire plan --model bert_base --profiles profiles.json --nodes 8 --gpus 8 --intra 300gbyte/s --inter 100gbit --codec dgc
    """
    from ..planner.export import to_plan
    from ..planner.profile import Profile
    from ..planner.search import choose
    from ..planner.what_if import on_cluster

    with errors():
        if (profile is None) == (model is None):
            raise PlanError("give either --profile FILE, a measured job, or --model NAME with --profiles FILE")
        if profile is not None:
            if search != "joint":
                raise PlanError(f"a measured job is planned by the search 'joint', not by {search!r}")
            job = Profile.load(profile)
            if nodes is not None or inter:
                if not inter:
                    raise PlanError(
                        "another number of nodes needs the rate of the links between them, as in --inter 25gbit"
                    )
                job = on_cluster(job, nodes or job.cluster.nodes, parse_bytes_per_second(inter))
            planning.ready()
            made = choose(job, quality=cast("Quality", quality), slack=slack)
            row = planning.measured_row(made)
            _show(_lines_of(made, job), row)
            for remark in made.remarks:
                console.print(escape(remark), soft_wrap=True)
        else:
            assert model is not None
            names = codec or ["dgc"]
            where = planning.network(network, nodes or 8, gpus, intra, inter)
            simulation = planning.simulate(
                planning.published(profiles), model, names, density, where, forward,
                cpu=cpu, max_compressions=max_compressions,
            )  # fmt: skip
            planning.ready()
            found, dense = simulation.search(search), simulation.search("fp32").seconds
            row = planning.row(simulation, found, dense, "+".join(names))
            if out is not None:
                made = to_plan(simulation, found, dense)
            _show(_lines(simulation, found), row)
            console.print(planning.SOURCES, soft_wrap=True)
            if where.world == 1:
                console.print("one rank: there is nothing to exchange")
        if out is not None:
            made.save(out)
        write(json_file, "plan", [row], {"out": str(out) if out is not None else None})


class _Line(NamedTuple):
    names: tuple[str, ...]
    elements: float
    way: str
    start: float
    end: float


def _lines(simulation: Simulation, found: Outcome) -> list[_Line]:
    return [
        _Line(
            tuple(tensor.name for tensor in simulation.tensors[start:stop]),
            float(simulation.elements[start:stop].sum()),
            str(simulation.option(number)),
            spans[0].start,
            spans[-1].end,
        )
        for (start, stop, number), spans in zip(found.groups, simulation.operations(found.groups), strict=True)
    ]


def _lines_of(made: Plan, job: Profile) -> list[_Line]:
    sizes = {tensor.name: tensor.elements for tensor in job.tensors}
    return [
        _Line(
            group.names,
            float(sum(sizes[name] for name in group.names)),
            f"{group.codec} via {group.chain}" if group.chain else group.codec,
            group.operations[0].start,
            group.operations[-1].end,
        )
        for group in made.groups
    ]


def _show(lines: list[_Line], row: dict[str, Any]) -> None:
    table = Table(title=f"{row['model']}, {row['network']}, search {row['search']}", title_justify="left")
    for column in ("groups", "tensors", "M elements", "ms", "way"):
        table.add_column(column, justify="right" if column not in ("tensors", "way") else "left", overflow="fold")
    # Consecutive groups with the same codec and chain share a line.
    for way, same in groupby(lines, key=lambda line: line.way):
        run = list(same)
        names = [name for line in run for name in line.names]
        table.add_row(
            str(len(run)),
            names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})",
            f"{1e-6 * sum(line.elements for line in run):.3f}",
            f"{1e3 * run[0].start:.1f}-{1e3 * run[-1].end:.1f}",
            way,
        )
    show_table(table, 140)
    bound, dense, predicted = row["bound_seconds"], row["dense_seconds"], row["predicted_seconds"]
    output.print(
        f"step {1e3 * predicted:.2f} ms; dense {1e3 * dense:.2f} ms ({dense / max(predicted, 1e-12):.2f} x); without "
        f"communication {1e3 * bound:.2f} ms; scaling factor {row['scaling_factor']:.3f}; "
        f"found in {1e3 * row['search_seconds']:.0f} ms",
        soft_wrap=True,
    )
