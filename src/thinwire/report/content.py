"""The data of a report page: numbers and texts without presentation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..engine.journal import Fit, GroupLine, Journal, Step, Trace
from ..engine.layout import SMALL_GROUP
from ..planner.plan import Plan, PlanGroup
from .headline import headlines
from .phases import phases
from .runs import SECONDS, Results, Run, mean, settled, summarise, typical
from .timeline import coverage, waits

POINTS = 2000
"""Most points of a curve; longer runs are averaged over neighbouring steps."""
TRACES = 20
LOOKS = 20

COLUMNS = (*SECONDS, "bytes", "link_bytes", "density", "target", "residual_norm")


def content(given: Sequence[Run | Results]) -> dict[str, Any]:
    runs = [one for one in given if isinstance(one, Run)]
    return {
        "headlines": list(headlines(runs)),
        "runs": [_run(run) for run in runs],
        "results": [
            {
                "name": one.name,
                "command": one.command,
                "rows": [_finite(row) for row in one.rows],
                "machine": _finite(one.machine),
                "versions": _finite(one.versions),
            }
            for one in given
            if isinstance(one, Results)
        ],
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _run(run: Run) -> dict[str, Any]:
    found = run.first
    plan = next((layout.plan for layout in reversed(found.layouts) if layout.plan is not None), None)
    groups = found.layouts[-1].groups if found.layouts else ()
    return {
        "name": run.name,
        "summary": _finite(summarise(run)),
        "start": {"host": found.start.host, "thinwire": found.start.thinwire, "torch": found.start.torch},
        "began": found.starts[0].time,
        "columns": _columns(found.steps),
        "binned": len(found.by_step) > POINTS,
        "notes": _notes(found),
        "phases": phases(found),
        "events": [[event.step, event.what, event.text] for event in found.events],
        "groups": _groups(found, groups, plan),
        "ranks": [_rank(one) for one in run.journals] if len(run.journals) > 1 else [],
        "plan": _plan(plan) if plan is not None else None,
        "predicted": _predicted(plan, groups) if plan is not None else [],
        "fits": _fits(found),
        "traces": [_trace(found, trace) for trace in list(found.traces.values())[-TRACES:]],
    }


def _columns(steps: Sequence[Step]) -> dict[str, list[float | None]]:
    """The numbers of all steps, one list per column; averaged over neighbours beyond POINTS."""
    width = -(-len(steps) // POINTS) or 1
    bins = [steps[at : at + width] for at in range(0, len(steps), width)]
    columns: dict[str, list[float | None]] = {name: [mean(b, name) for b in bins] for name in COLUMNS}
    columns["step"] = [float(b[-1].step) for b in bins]
    columns["time"] = [b[-1].time for b in bins]
    return columns


def _notes(found: Journal) -> dict[str, dict[str, list[float | None]]]:
    """Each user-defined metric as columns: step, time, value."""
    notes: dict[str, dict[str, list[float | None]]] = {}
    for note in sorted(found.notes, key=lambda note: (note.step, note.time)):
        for name, value in note.values.items():
            into = notes.setdefault(name, {"step": [], "time": [], "value": []})
            if into["step"] and into["step"][-1] == note.step:
                into["time"][-1], into["value"][-1] = note.time, value
                continue
            into["step"].append(float(note.step))
            into["time"].append(note.time)
            into["value"].append(value)
    return {name: _thin(columns) for name, columns in notes.items()}


def _thin(columns: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    every = -(-len(columns["step"]) // POINTS) or 1
    return {name: values[::every] for name, values in columns.items()}


def _fits(found: Journal) -> list[dict[str, Any]]:
    """By group, in the order in which they were seen: how magnitudes were distributed in each exchange looked at."""
    by_group: dict[str, dict[int, Fit]] = {}
    for fit in found.fits:
        by_group.setdefault(fit.group, {})[fit.step] = fit
    return [
        {
            "group": group,
            "looks": [
                {
                    "step": fit.step,
                    "zeros": fit.zeros,
                    "edges": list(fit.edges),
                    "shares": list(fit.shares),
                    "models": [[model.name, model.distance, list(model.shares)] for model in fit.models],
                }
                for fit in list(by_step.values())[-LOOKS:]
            ],
        }
        for group, by_step in by_group.items()
    ]


def _rank(found: Journal) -> dict[str, Any]:
    steps = settled(found.steps)
    return {
        "rank": found.start.rank,
        "host": found.start.host,
        **{name: mean(typical(steps), name) for name in SECONDS},
        "link_bytes": mean(steps, "link_bytes"),
    }


def _groups(found: Journal, groups: Sequence[GroupLine], plan: Plan | None) -> list[dict[str, Any]]:
    """Codec, reason and costs of each group; costs are medians over the steps of the current layout."""
    began = found.layouts[-1].step if found.layouts else 0
    steps = settled([s for s in found.steps if s.step > began and len(s.groups) == len(groups) and not s.skipped])
    rows = []
    for at, group in enumerate(groups):
        each = [step.groups[at] for step in steps if step.groups]
        planned = _planned(plan, group) if plan is not None else None
        sent = statistics.fmean(one.sent for one in each) if each else 0.0
        rows.append(
            {
                "name": group.name,
                "codec": f"{group.codec} via {group.chain}" if group.chain else group.codec,
                "why": _why(group, found.start.codec, planned),
                "elements": group.elements,
                "tensors": list(group.tensors),
                "expected_bytes": group.expected_bytes,
                "bytes": statistics.fmean(one.bytes for one in each) if each else None,
                "density": sent / group.elements if sent and group.elements else None,
                **{
                    name: statistics.median(getattr(one, name) for one in each) if each else None
                    for name in ("encode", "wire", "decode")
                },
                "predicted": _sums(planned) if planned is not None else None,
            }
        )
    return rows


def _planned(plan: Plan, group: GroupLine) -> PlanGroup | None:
    if group.name.startswith(SMALL_GROUP):
        return None  # combines tensors of several groups of the plan, so none of their predictions applies
    names = set(group.tensors)
    return next((one for one in plan.groups if names.intersection(one.names)), None)


def _why(group: GroupLine, asked: str, planned: PlanGroup | None) -> str:
    if group.name.startswith(SMALL_GROUP):
        return "small or excluded tensors are sent dense, together"
    if planned is None:
        return f"requested: {asked}"
    if planned.codec == "dense" and not planned.chain:
        return "the plan: compressing this group gains nothing within its slack"
    return "the plan: least loss among the nearly fastest options"


def _sums(planned: PlanGroup) -> dict[str, float]:
    """Predicted seconds by phase."""
    spent = {"encode": 0.0, "wire": 0.0, "decode": 0.0}
    for operation in planned.operations:
        kind = "wire" if operation.lane == "wire" else "encode" if operation.name == "encode" else "decode"
        spent[kind] += operation.end - operation.start
    return spent


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "quality": plan.quality,
        "search": plan.search,
        "predicted": plan.predicted_seconds,
        "dense": plan.dense_seconds,
        "bound": plan.bound_seconds,
        "loss": plan.loss,
        "remarks": list(plan.remarks),
        "rate": plan.cluster.rate,
        "nodes": plan.cluster.nodes,
        "ranks_per_node": plan.cluster.ranks_per_node,
    }


def _predicted(plan: Plan, groups: Sequence[GroupLine]) -> list[list[Any]]:
    """Operations of the plan as [group, name, lane, start, end], with the group's index in the layout."""
    home = {name: at for at, group in enumerate(groups) for name in group.tensors}
    spans: list[list[Any]] = []
    for one in plan.groups:
        at = next((home[name] for name in one.names if name in home), None)
        if at is not None:
            spans += [[at, op.name, op.lane, op.start, op.end] for op in one.operations]
    return spans


def _trace(found: Journal, trace: Trace) -> dict[str, Any]:
    """A traced step, in seconds since the start of backward if recorded, otherwise since the first bucket was ready."""
    backward = [span.start for span in trace.spans if span.lane == "job" and span.name == "backward"]
    zero = backward[-1] if backward else min((arrival.at for arrival in trace.arrivals), default=0.0)
    return {
        "step": trace.step,
        "seconds": trace.seconds,
        "zero": zero,
        "coverage": coverage(trace),
        "groups": [group.name for group in found.layout_of(trace.step, trace.path)],
        "spans": [
            [span.lane, span.name, span.group, round(span.start - zero, 7), round(span.end - zero, 7)]
            for span in (*trace.spans, *waits(trace))
        ],
        "arrivals": [[round(a.at - zero, 7), a.tensors, a.first, list(a.groups)] for a in trace.arrivals],
    }
