"""The headline of a page: won, tied, lost, at another loss, and without losses or bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.engine import journal
from thinwire.report.content import content
from thinwire.report.headline import Course, compare, course, headlines, smoothed, times
from thinwire.report.phases import phases
from thinwire.report.runs import Run, load


def made(
    name: str, step: float, loss: float, size: float | None = None, steps: int = 100, start: float = 4.0
) -> Course:
    """A run whose loss falls evenly from `start` to `loss`."""
    curve = [(step * n, start + (loss - start) * n / steps) for n in range(1, steps + 1)]
    return Course(name, step * steps, step, steps, curve, size)


SAID = "2.9 times faster to the same loss, 4.5 times fewer bytes"
"""Of the runs of `pair`."""

PLAIN = made("plain", 0.41, 2.0, 3600.0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (made("won", 0.1, 2.0, 100.0), "4.1 times faster to the same loss, 36 times fewer bytes"),
        (made("near", 0.1, 2.04, 100.0), "4.1 times faster to the same loss, 36 times fewer bytes"),
        (made("tied", 0.405, 2.0, 3700.0), "as fast to the same loss, as many bytes"),
        (made("lost", 0.82, 2.01, 1800.0), "2.0 times slower to the same loss, 2.0 times fewer bytes"),
        (made("more", 0.41, 2.0, 7200.0), "as fast to the same loss, 2.0 times more bytes"),
        (made("blind", 0.1, 2.0, None), "4.1 times faster to the same loss"),
    ],
    ids=lambda value: value.name if isinstance(value, Course) else "",
)
def test_words_of_a_comparison(other: Course, said: str) -> None:
    assert compare(PLAIN, other) == said


def test_another_loss_is_compared_at_what_both_reach() -> None:
    """Plain DDP reaches the worse loss of 3.0 half-way."""
    worse = made("worse", 0.1, 3.0, 100.0)
    assert (
        compare(PLAIN, worse)
        == "2.0 times faster to a loss of 3.00, 36 times fewer bytes, but the loss at the end is 1.00 higher"
    )
    better = made("better", 0.41, 1.0)
    assert compare(PLAIN, better) == "1.5 times faster to a loss of 2.00, and the loss at the end is 1.00 lower"
    slow = made("slow", 0.41, 3.0)
    assert compare(PLAIN, slow) == "2.0 times slower to a loss of 3.00, but the loss at the end is 1.00 higher"


def test_without_losses_steps_are_compared() -> None:
    plain, other = Course("plain", 10.0, 0.1, 100), Course("other", 5.0, 0.04, 100)
    assert compare(plain, other) == "2.5 times faster per step"
    assert compare(Course("plain", None, None, 0), other) == ""


def test_bytes_are_those_of_a_step() -> None:
    """A run of half as many steps has not sent fewer bytes by that."""
    assert "as many bytes" in compare(PLAIN, made("short", 0.1, 2.0, 1800.0, steps=50))


def test_two_digits() -> None:
    assert [times(ratio) for ratio in (1.06, 9.94, 9.96, 36.4)] == ["1.1 times", "9.9 times", "10 times", "36 times"]


def test_losses_are_means_of_the_last_ten() -> None:
    assert smoothed([1.0, 2.0, 3.0], [3.0, 1.0, 2.0]) == [(1.0, 3.0), (2.0, 2.0), (3.0, 2.0)]
    assert smoothed(list(range(12)), list(range(12)))[-1] == (11, 6.5)


def test_a_run_by_itself(real_run: Path) -> None:
    run = load(real_run)
    assert isinstance(run, Run)
    (said,) = headlines([run])
    assert "ms per step" in said
    assert "% of it waiting" in said
    assert "times fewer bytes than dense" in said


def test_the_course_of_a_run(real_run: Path) -> None:
    run = load(real_run)
    assert isinstance(run, Run)
    found = course(run)
    assert found.steps == len(found.losses) == 30
    assert found.bytes == sum(step.bytes or 0 for step in run.first.steps)
    assert found.seconds is not None
    assert [at for at, _ in found.losses] == sorted(at for at, _ in found.losses)


def pair(folder: Path) -> list[Run]:
    """Journals of plain DDP and of a job that watched eight steps, measured for three seconds and got ten times faster."""
    runs = []
    for name, steps in (("plain DDP", [0.4] * 60), ("thinwire", [0.4] * 8 + [3.04] + [0.04] * 51)):
        wired, at = name == "thinwire", 1000.0
        with (folder / f"{name}.jsonl").open("wb") as file:
            lines: list[journal.Line] = [journal.Start(journal.VERSION, at, 0, 2, "auto", "0", "2.13", "here")]
            for number, seconds in enumerate(steps, 1):
                at += seconds
                path = "layout" if wired and number > 8 else "ddp"
                lines.append(
                    journal.Step(number, at, seconds, path=path, link_bytes=100_000 if path == "layout" else 1_000_000)
                )
                lines.append(journal.Note(number, at, {"loss": 4.0 - number / 30}))
                if wired and number == 8:
                    lines.append(journal.Event(number, at + 3.0, "auto", "switching"))
            file.writelines(journal.encode(line) + b"\n" for line in lines)
        run = load(folder / f"{name}.jsonl")
        assert isinstance(run, Run)
        runs.append(run)
    return runs


def test_what_was_not_training_is_marked(tmp_path: Path) -> None:
    plain, wired = pair(tmp_path)
    assert phases(plain.first) == []
    watched, pause = phases(wired.first)
    assert (watched.kind, pause.kind) == ("ddp", "pause")
    assert (watched.start, watched.end) == pytest.approx((0.0, 3.2))
    assert (pause.start, pause.end) == pytest.approx((3.2, 6.2))


def test_the_data_of_a_page_says_it(tmp_path: Path) -> None:
    shown = content(pair(tmp_path))
    assert shown["headlines"] == [SAID]
    assert [len(run["phases"]) for run in shown["runs"]] == [0, 2]
