"""What `auto` decides, on recorded measurements: no link is timed, and a busy machine decides the same."""

from __future__ import annotations

from pathlib import Path

import pytest

import thinwire
from tests.auto.recorded import NOISE, Ended, Machine, job
from tests.ranks import run
from thinwire.auto.job import CHECKED
from thinwire.auto.monitor import PERIOD
from thinwire.auto.patience import DISAPPOINTMENTS, FIRST
from thinwire.auto.profiling import WATCHED
from thinwire.auto.trial import CONTROLS, GLANCE, SETTLE, WINDOW
from thinwire.planner.drift import Cusum
from thinwire.planner.replan import is_dense

PLANNED = WATCHED + 1
"""The search runs beside one step."""
TRIAL = SETTLE + WINDOW + len(CONTROLS)

FAST, SLOW = 0.03, 3.0  # DDP alone spends a fiftieth of a step on such links, or half of it


def _run(machine: Machine, steps: int, plan_file: str | Path = "") -> Ended:
    """Such a job on two ranks, which must decide alike, hold the same parameters and lose nothing but what a cast rounds."""
    first, second = run(2, job, machine, steps, str(plan_file))
    assert first.decisions == second.decisions
    assert first.digest == second.digest
    assert max(first.lost, second.lost) <= 1e-3
    return first


def test_links_that_become_slow_and_fast_again_are_noticed() -> None:
    drop, rise = 41, 110
    ended = _run(Machine({0: FAST, drop: SLOW, rise: FAST}), 160)
    (_, begun), (decided, stayed), (noticed, seen), (adopted, switched), (kept, words), *later = ended.decisions
    assert "watching DDP alone, without a hook" in begun
    assert decided == PLANNED
    assert "where a hook may cost 4%; DDP stays alone, no hook is registered" in stayed
    assert drop < noticed <= drop + 3 * PERIOD
    assert "links pass a byte in 100.00 times the seconds: planning again" in seen
    assert adopted <= noticed + 2 * PERIOD
    assert "switching to plan: " in switched
    assert kept == adopted + TRIAL
    assert words.endswith(": kept")
    assert rise < later[0][0] <= rise + 4 * PERIOD, "the codec hides it, the message between steps shows it"
    assert "links pass a byte in 0.01 times the seconds: planning again" in later[0][1]
    assert "no change" in later[1][1], "a hook is there already, and steps are as short as they can be"
    assert ended.hooked


def test_a_trial_that_is_far_slower_goes_back_first_and_then_looks_at_links() -> None:
    ended = _run(Machine({0: SLOW, PLANNED + 5: 500 * SLOW}), PLANNED + 2 * GLANCE + CHECKED + 3 * PERIOD)
    switched, back, seen = ended.decisions[1:4]
    assert "switching to plan" in switched[1]
    assert back[0] == PLANNED + 2 * GLANCE, "long before the trial would have ended"
    assert "not faster; gradients travel dense, by plain all-reduces" in back[1]
    assert seen[0] == back[0] + CHECKED
    assert "links pass a byte in 500.00 times the seconds: planning again" in seen[1]
    assert len(ended.decisions) > 4


def test_three_disappointments_in_a_row_end_it() -> None:
    """Whatever is tried takes thrice as long as predicted, on links that change again and again."""
    links = {0: SLOW} | {30 + 60 * times: SLOW * (20.0 if times % 2 == 0 else 1.0) for times in range(8)}
    ended = _run(Machine(links, hook=40.0), 420)
    texts = [text for _, text in ended.decisions]
    assert sum("not faster" in text for text in texts) == DISAPPOINTMENTS
    assert f"after {DISAPPOINTMENTS} of them in a row nothing else is tried" in texts[-1]
    assert ended.words.endswith("now: dense")


def test_a_busy_cpu_is_not_taken_for_slow_links() -> None:
    """Steps take twice as long because the thread waits for a core; so do the messages."""
    begin, end = 41, 90
    ended = _run(Machine({0: FAST}, waiting={0: 0.0, begin: 0.4, end: 0.0}), 140)
    said = [(step, text) for step, text in ended.decisions if "CPU contention, not links" in text]
    assert begin < said[0][0] <= begin + 3 * PERIOD
    assert end < said[-1][0] <= end + 3 * PERIOD, "that it ended is no change of links either"
    assert not any("planning again, " in text or "switching" in text for _, text in ended.decisions)
    assert not ended.hooked


def test_steps_and_links_that_do_not_fit_are_watched_once_more() -> None:
    ended = _run(Machine({0: SLOW}, native=1.8), PLANNED + CHECKED + 1)
    (first, doubt), (second, decision) = ended.decisions[1:]
    assert (first, second) == (WATCHED, PLANNED + CHECKED)
    assert f"by its links it should take 644 ms: watching {CHECKED} more steps" in doubt
    assert "switching to plan" in decision


@pytest.mark.parametrize(("links", "native", "looks"), [(20 * SLOW, 0.3, 1), (SLOW, 4.0, 2)])
def test_measurements_that_contradict_steps_are_thrown_away(links: float, native: float, looks: int) -> None:
    first = WATCHED + CHECKED
    ended = _run(Machine({0: links}, native=native), looks * first + (looks - 1) * FIRST + 2)
    busy = [(step, text) for step, text in ended.decisions if "the machine is too busy to tell" in text]
    assert [step for step, _ in busy] == [first, first + FIRST + first][:looks]
    assert f"DDP stays alone, no hook is registered, looking again after {FIRST} steps" in busy[0][1]
    assert f"looking again after {looks * FIRST} steps" in busy[-1][1]
    assert not ended.hooked


@pytest.mark.parametrize(
    ("links", "native", "crowd", "words"),
    [
        (1e-6, 0.8, 1.0, "no method can save 4%; DDP stays alone"),
        (0.12, 1.0, 1.0, "switching to plan"),
        (0.12, 1.0, 1.9, "where a hook may cost 8%, with 1.9 threads for every core; DDP stays alone"),
        (0.12, 1.0, 9.0, "where a hook may cost 8%, with 9.0 threads for every core; DDP stays alone"),
        (SLOW, 1.0, 9.0, "switching to plan"),
    ],
)
def test_a_hook_must_be_worth_what_it_costs(links: float, native: float, crowd: float, words: str) -> None:
    ended = _run(Machine({0: links}, native=native, crowd=crowd), PLANNED + 1)
    assert words in ended.decisions[1][1]


def test_the_next_run_begins_with_what_one_chose(tmp_path: Path) -> None:
    file = tmp_path / "plans" / "mine.json"
    ended = _run(Machine({0: SLOW}), PLANNED + 2 * TRIAL + 4, file)
    tried = [text for _, text in ended.decisions[1:]]
    assert "switching to plan: " in tried[0]
    assert "one codec for everything is predicted at" in tried[1]
    assert "not faster; back to plan: " in tried[2], "steps were disturbed in that trial"
    plan = thinwire.Plan.load(file)
    assert (plan.quality, plan.cluster.world) == ("high", 2)
    assert not is_dense(plan)
    again = _run(Machine({0: SLOW}, hook=3.0), WATCHED + TRIAL + 2, file)
    assert f"by the plan {file} of an earlier run; switching to plan: " in again.words
    assert "not faster; gradients travel dense, by plain all-reduces" in again.decisions[-1][1]
    assert again.words.endswith("now: dense")
    assert is_dense(thinwire.Plan.load(file))
    last = _run(Machine({0: SLOW}), WATCHED + 1, file)
    assert f"by the plan {file} of an earlier run DDP stays alone, no hook is registered" in last.words
    assert not last.hooked


@pytest.mark.parametrize("rank", range(2))
def test_recorded_noise_is_not_a_change_and_a_change_is_found_in_it(rank: int) -> None:
    """Medians of eight steps on a busy machine, some of which took five times as long as others."""
    looks = [sorted(NOISE[rank][at : at + PERIOD])[PERIOD // 2] for at in range(0, len(NOISE[rank]) - PERIOD, PERIOD)]
    for begin in range(len(looks) - 4):
        steady = Cusum()
        assert not any(steady.observe(seconds) for seconds in looks[begin:])
        for factor in (2.0, 0.5):
            watch = Cusum()
            assert not any(watch.observe(seconds) for seconds in looks[begin : begin + 2])
            assert any(watch.observe(factor * seconds) for seconds in looks[begin + 2 : begin + 4])
