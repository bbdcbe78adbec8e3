"""What `thinwire demo` says of its runs, and that it fits 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from thinwire.cli import demo
from thinwire.cli.verdict import NEXT, Link, Pair, not_shown, rows, summary, totals, verdict
from thinwire.lab.demo import Outcome
from thinwire.lab.demo_setup import Setup
from thinwire.report.headline import Course, smoothed

SLOW = Link("100mbit", True)
STEPS = 200


def outcome(
    method: str, step: float, *, loss: float = 2.0, pause: float = 0.0, watched: int = 0, sent: int | None = 4_000_000
) -> Outcome:
    """A run of STEPS steps: `watched` of DDP alone at 0.4 s, a pause, and the rest by a layout."""
    found = Outcome(method, began=0.0, steps=STEPS)
    at = 0.0
    for number in range(STEPS):
        at += 0.4 if number < watched else step
        at += pause if number == watched else 0.0
        found.ends.append(at)
        found.losses.append(loss + 3.0 * 0.9**number)
        found.paths.append("ddp" if method == "fp32" or number < watched else "layout")
        found.sent.append(None if sent is None else sent * (number + 1))
    return found


def pair(plain: Outcome, ours: Outcome, link: Link = SLOW, setup: Setup = Setup()) -> Pair:
    courses = [
        Course(one.method, one.total_seconds, one.step_seconds, STEPS, smoothed(one.ends, one.losses), one.bytes_sent)
        for one in (plain, ours)
    ]
    return Pair(plain, ours, courses[0], courses[1], link, setup)


PLAIN = outcome("fp32", 0.4)
WON = pair(PLAIN, outcome("auto", 0.05, pause=3.0, watched=8, sent=100_000))
HIGHER = pair(PLAIN, outcome("adacomp", 0.05, loss=2.3, sent=100_000))
TIE = pair(PLAIN, outcome("auto", 0.4, watched=STEPS))
LATE = pair(PLAIN, outcome("auto", 0.3, pause=30.0, watched=8))
SLOWER = pair(PLAIN, outcome("micro(density=0.01)", 0.6, sent=100_000))
BLIND = pair(outcome("fp32", 0.06, sent=None), outcome("auto", 0.09, sent=None), Link("100mbit", False, "no `ip`"))
ALL = {"won": WON, "higher": HIGHER, "tie": TIE, "late": LATE, "slower": SLOWER, "blind": BLIND}


def test_totals() -> None:
    assert totals(WON) == "plain DDP: 80 s; thinwire: 16 s, of which 3.0 s measuring; same loss"
    assert totals(HIGHER) == "plain DDP: 80 s; thinwire: 10 s; loss 0.30 higher"


def test_a_verdict_of_a_win() -> None:
    assert verdict(WON) == "thinwire was 5.1 times faster to the same loss and sent 40 times fewer bytes."


def test_a_verdict_of_a_higher_loss() -> None:
    said = verdict(HIGHER)
    assert "faster to a loss of 2.30 and sent 40 times fewer bytes, but the loss at the end is 0.30 higher" in said
    assert said.endswith("because what it held back came too late in so short a run.")


def test_a_verdict_of_a_tie() -> None:
    said = verdict(TIE)
    assert said.startswith("thinwire was as fast to the same loss")
    assert said.endswith("over a link of 100mbit it found nothing to gain and left gradients dense.")


def test_a_verdict_of_a_run_that_was_too_short() -> None:
    """80 s against 93: ten steps of 0.4 s and thirty seconds of measuring are earned back by 0.1 s per step."""
    said = verdict(LATE)
    assert said.startswith("thinwire was 1.1 times slower to the same loss")
    assert "its steps took 300 ms, those of plain DDP 400 ms" in said
    assert said.endswith("but starting and measuring cost 31 s, earned back after 308 steps.")


def test_a_verdict_of_slower_steps() -> None:
    said = verdict(SLOWER)
    assert "1.5 times slower to the same loss and sent 40 times fewer bytes: its steps took 600 ms" in said
    assert said.endswith("over a link of 100mbit compressing costs more than it saves.")


def test_without_namespaces() -> None:
    said = not_shown(BLIND.link)
    for part in (
        "no `ip`",
        "loopback",
        "neither what a link of 100mbit costs nor what a node sends",
        "thinwire doctor",
    ):
        assert part in said
    assert verdict(BLIND).endswith("over a link that is not shaped compressing costs more than it saves.")
    assert "bytes" not in verdict(BLIND)


@pytest.mark.parametrize("name", ALL)
def test_it_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "output", Console(file=shown, width=80, highlight=False))
    found = ALL[name]
    demo._show(found)
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("plain DDP: "), "totals first"
    assert any("loss at the end" in line for line in lines), "a heading in one piece"
    assert "…" not in shown.getvalue()
    for row in (found.plain, found.ours):
        assert any(f"{row.last_loss:.3f}" in line for line in lines), "the last column"
    words = " ".join(shown.getvalue().split())
    assert verdict(found) in words
    assert lines[-len(NEXT) :] == list(NEXT)


def test_progress_on_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo, "console", Console(file=shown, width=80, force_terminal=True))
    with demo._two_lines() as (first, second):
        first(Outcome("fp32", steps=STEPS))
        first(PLAIN)
        second(Outcome("auto", steps=STEPS))
        second(WON.ours)
    last = Console(width=80).render_str(shown.getvalue()).plain
    assert "200/200 loss 2.00  800 MB sent" in last
    assert "200/200 loss 2.00  20 MB sent" in last


def test_results() -> None:
    plain, ours = rows(WON)
    assert (plain["label"], ours["label"]) == ("plain DDP", "thinwire")
    assert plain["measuring_seconds"] is None
    assert ours["ratio_of_totals"] == pytest.approx(15.8 / 80)
    assert ours["measuring_seconds"] == pytest.approx(3.0)
    assert ours["longest_pause_seconds"] == pytest.approx(3.0)
    assert (plain["bytes"], plain["bytes_per_rank"]) == (800_000_000, 4_000_000)
    found = summary(WON)
    assert found["headline"] == "5.1 times faster to the same loss, 40 times fewer bytes"
    assert found["verdict"] == verdict(WON)
    first, second = found["curves"]
    assert first["seconds"][-1] == pytest.approx(80.0)
    assert second["seconds"][-1] == pytest.approx(15.8)
    assert len(first["loss"]) == len(first["seconds"]) <= 121


def test_a_command_repeats_the_demo() -> None:
    assert Setup().command == "thinwire demo"
    setup = Setup("micro(density=0.01)", "1gbit", 4, None, 100, 2.0, Path("folder/a.txt"))
    assert (
        setup.command
        == 'thinwire demo --codec "micro(density=0.01)" --rate 1gbit --nodes 4 --steps 100 --lr 2 --data a.txt'
    )
    assert replace(Setup(), minutes=0.5).command == "thinwire demo --minutes 0.5"
    assert replace(Setup(), minutes=0.5).seconds < Setup().seconds == 105.0
