"""What `thinwire demo` says of its two runs: sentences, and the rows of its results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..lab.demo import Outcome
from ..lab.demo_setup import WORKLOAD, Setup
from ..report.headline import SAME, SAME_LOSS, Course, compare, ending, speed, volume

NEXT = (
    "Next, in your own script:",
    "  wire = thinwire.attach(ddp)      # after ddp = DistributedDataParallel(model)",
    "  print(wire.explain())            # at the end: what was measured and decided",
    "or with the script as it is: torchrun ... -m thinwire.run train.py",
)

CURVE = 120
"""Points of the loss of a run in the results."""


@dataclass(frozen=True)
class Link:
    """What joins the nodes. `why_not` says why it is not emulated; empty where it is."""

    rate: str
    shaped: bool
    why_not: str = ""


@dataclass(frozen=True)
class Pair:
    """Both runs, each as the job reported it and as its journal tells it."""

    plain: Outcome
    ours: Outcome
    plain_course: Course
    our_course: Course
    link: Link
    setup: Setup

    @property
    def apart(self) -> float:
        """How much higher the loss of thinwire is at the end."""
        return self.ours.last_loss - self.plain.last_loss


def not_shown(link: Link) -> str:
    """What a run without emulated links cannot show."""
    return (
        f"Slow links cannot be emulated here ({link.why_not}). Both runs go over this machine's loopback: they show that "
        f"training works and what loss it ends with, but neither what a link of {link.rate} costs nor what a node sends. "
        "`thinwire doctor` says what is missing."
    )


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def milliseconds(value: float) -> str:
    return f"{1000 * value:.0f} ms"


def totals(pair: Pair) -> str:
    """`plain DDP: 61 s; thinwire: 15 s, of which 3.0 s measuring; same loss`."""
    what = "measuring" if pair.ours.method == "auto" else "in pauses"
    loss = "same loss" if abs(pair.apart) <= SAME_LOSS else f"loss {_higher(pair.apart)}"
    paused = f", of which {seconds(pair.ours.measuring_seconds)} {what}" if pair.ours.measuring_seconds else ""
    times = f"plain DDP: {seconds(pair.plain.total_seconds)}; thinwire: {seconds(pair.ours.total_seconds)}"
    return f"{times}{paused}; {loss}"


def _higher(apart: float) -> str:
    return f"{abs(apart):.2f} {'higher' if apart > 0 else 'lower'}"


def verdict(pair: Pair) -> str:
    """One sentence: whether thinwire won, by how much, and why not where it did not."""
    courses = pair.plain_course, pair.our_course
    sent = volume(*courses)
    words = f"thinwire was {speed(*courses)}" + (f" and sent {sent}" if sent else "")
    if end := ending(*courses):
        words += f", {end}"
    if pair.apart > SAME_LOSS:
        words += ", because what it held back came too late in so short a run"
    if pair.ours.total_seconds * SAME > pair.plain.total_seconds:
        words += f": {_why_not_faster(pair)}"
    return words + "."


def _why_not_faster(pair: Pair) -> str:
    plain, ours, link = pair.plain, pair.ours, pair.link
    steps = f"its steps took {milliseconds(ours.step_seconds)}, those of plain DDP {milliseconds(plain.step_seconds)}"
    where = f"over a link of {link.rate}" if link.shaped else "over a link that is not shaped"
    if not ours.compressed:
        return f"{steps}; {where} it found nothing to gain and left gradients dense"
    gain = plain.step_seconds - ours.step_seconds
    if plain.step_seconds > SAME * ours.step_seconds:
        # What is not steps, compared with plain DDP: paid once, and earned back by shorter steps.
        lost = ours.total_seconds - plain.total_seconds + len(ours.ends) * gain
        return f"{steps}, but starting and measuring cost {seconds(lost)}, earned back after {math.ceil(lost / gain)} steps"
    return f"{steps}; {where} compressing costs more than it saves"


# -- results -----------------------------------------------------------------------------------------------------------


def rows(pair: Pair) -> list[dict[str, Any]]:
    return [_row(pair, pair.plain, "plain DDP"), _row(pair, pair.ours, "thinwire")]


def _row(pair: Pair, outcome: Outcome, label: str) -> dict[str, Any]:
    steps, sent = len(outcome.ends), outcome.bytes_sent
    return {
        "workload": WORKLOAD,
        "nodes": pair.setup.nodes,
        "ranks_per_node": 1,
        "rate": pair.link.rate,
        "method": outcome.method,
        "label": label,
        "steps": steps,
        "total_seconds": outcome.total_seconds,
        "ratio_of_totals": outcome.total_seconds / pair.plain.total_seconds,
        "measuring_seconds": None if outcome is pair.plain else outcome.measuring_seconds,
        "longest_pause_seconds": outcome.longest_pause_seconds,
        "seconds": outcome.step_seconds,
        "ratio_to_fp32": outcome.step_seconds / pair.plain.step_seconds,
        "bytes": sent,
        "bytes_per_rank": None if sent is None else sent / steps,
        "stats_bytes_per_rank": outcome.stats.get("link_bytes_per_step"),
        "loss": outcome.last_loss,
    }


def summary(pair: Pair) -> dict[str, Any]:
    """What is said of both runs, and their loss over time."""
    return {
        "shaped": pair.link.shaped,
        "why_not_shaped": pair.link.why_not or None,
        "headline": compare(pair.plain_course, pair.our_course),
        "totals": totals(pair),
        "verdict": verdict(pair),
        "total_seconds": pair.ours.total_seconds,
        "measuring_seconds": pair.ours.measuring_seconds,
        "longest_pause_seconds": pair.ours.longest_pause_seconds,
        "explained": pair.ours.stats.get("explained"),
        "curves": [_curve(one) for one in (pair.plain_course, pair.our_course)],
    }


def _curve(course: Course) -> dict[str, list[float]]:
    every = -(-len(course.losses) // CURVE) or 1
    points = [*course.losses[:-1:every], *course.losses[-1:]]
    return {"seconds": [round(at, 3) for at, _ in points], "loss": [round(loss, 4) for _, loss in points]}
