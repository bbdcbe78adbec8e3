"""A plan for a job as it runs: links that take more beside a computation, and links that have changed."""

import msgspec
import pytest

from tests.planner import examples
from thinwire.planner.drift import scaled
from thinwire.planner.profile import Profile
from thinwire.planner.replan import (
    FURTHEST,
    ReplanRequest,
    apply_fit,
    best_plan,
    best_plan_fitted,
    fit_to_ddp,
    predict_ddp,
    replan,
)


def _fitted(profile, times):
    return apply_fit(msgspec.structs.replace(profile, fit=times))


@pytest.mark.parametrize("times", [0.5, 1.0, 2.5])
def test_links_are_fitted_to_what_ddp_alone_takes(times, tmp_path):
    profile = examples.profile()
    seconds = predict_ddp(_fitted(profile, times))
    assert fit_to_ddp(profile, seconds).fit == pytest.approx(times, rel=0.02)
    choice = best_plan_fitted(profile, "high", (), seconds)
    assert choice.profile == fit_to_ddp(profile, seconds)
    choice.profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == choice.profile, "the next run knows of it"
    assert choice.plan.dense_seconds == pytest.approx(seconds, rel=1e-6)
    expected = best_plan(_fitted(profile, times), "high").plan
    assert choice.plan.predicted_seconds == pytest.approx(expected.predicted_seconds, rel=0.02)


def test_what_no_link_explains_is_a_factor_for_everything():
    profile = examples.profile()
    seconds = 3.0 * predict_ddp(_fitted(profile, FURTHEST))
    assert fit_to_ddp(profile, seconds).fit == pytest.approx(FURTHEST, rel=0.02)
    choice = best_plan_fitted(profile, "high", (), seconds)
    assert choice.plan.dense_seconds == pytest.approx(seconds)
    expected = best_plan(_fitted(profile, FURTHEST), "high").plan
    assert choice.plan.predicted_seconds == pytest.approx(3.0 * expected.predicted_seconds, rel=0.05)


def test_what_a_byte_costs_a_computation_stays_when_links_change():
    """Twice the seconds for a byte; then links that need ten times as long: eleven times the seconds, not twenty."""
    profile = msgspec.structs.replace(examples.profile(bits_per_second=1e9), fit=2.0)
    slow = msgspec.structs.replace(scaled(profile, 10.0), fit=1.1)
    choice = replan(ReplanRequest(profile, None, "high", 10.0, predict_ddp(apply_fit(slow))))
    assert choice.profile.fit == pytest.approx(1.1)
    assert msgspec.structs.replace(choice.profile, fit=1.1) == slow
    expected = best_plan(apply_fit(slow), "high").plan
    assert choice.plan.predicted_seconds == pytest.approx(expected.predicted_seconds, rel=1e-6)
