"""`thinwire plan` and `thinwire simulate` as somebody types them."""

import json

import pytest
from typer.testing import CliRunner

from tests.planner import examples
from tests.planner.test_published import CONTENT
from thinwire.cli.app import app
from thinwire.cli.planning import numbers
from thinwire.errors import PlanError
from thinwire.planner.plan import Plan

FIELDS = {
    "model",
    "network",
    "search",
    "predicted_seconds",
    "bound_seconds",
    "dense_seconds",
    "search_seconds",
    "groups",
}


@pytest.fixture
def profiles(tmp_path):
    (tmp_path / "profiles.json").write_text(json.dumps(CONTENT))
    return str(tmp_path / "profiles.json")


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("search", ["espresso", "exact", "joint"])
def test_plan_of_a_published_model(profiles, tmp_path, search):
    rates = ["--intra", "300gbyte/s", "--inter", "100gbit"]
    files = ["--json", tmp_path / "row.json", "--out", tmp_path / "plan.json"]
    done = run("plan", "--model", "small", "--profiles", profiles, *rates, "--search", search, *files)
    assert done.exit_code == 0, done.output
    assert "scaling factor" in done.output
    (row,) = json.loads((tmp_path / "row.json").read_text())["rows"]
    assert set(row) >= FIELDS
    assert row["bound_seconds"] == pytest.approx(1.75e-3)
    assert row["bound_seconds"] <= row["predicted_seconds"] <= row["dense_seconds"]
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.predicted_seconds == row["predicted_seconds"]
    assert len(plan.groups) == row["groups"]
    assert max(group.operations[-1].end for group in plan.groups) <= plan.predicted_seconds * (1 + 1e-9)


def test_plan_of_a_measured_job(tmp_path):
    examples.profile(bits_per_second=1e8).save(tmp_path / "profile.json")
    words = ["plan", "--profile", tmp_path / "profile.json", "--out", tmp_path / "plan.json"]
    assert run(*words, "--json", tmp_path / "row.json").exit_code == 0
    (row,) = json.loads((tmp_path / "row.json").read_text())["rows"]
    assert set(row) >= FIELDS
    fast = Plan.load(tmp_path / "plan.json")
    assert run(*words, "--quality", "lossless").exit_code == 0
    dense = Plan.load(tmp_path / "plan.json")
    assert dense.loss == 0 < fast.loss
    assert fast.predicted_seconds < dense.predicted_seconds
    assert run(*words, "--nodes", 4, "--inter", "25gbit").exit_code == 0
    assert Plan.load(tmp_path / "plan.json").cluster.nodes == 4


def test_simulate_sweeps(profiles, tmp_path):
    words = ["--nodes", "2..8", "--network", "pcie-25g", "--codec", "dgc", "--codec", "fp16+efsignsgd"]
    words += ["--plot", tmp_path / "rows.svg"]
    done = run("simulate", "--profiles", profiles, *words, "--json", tmp_path / "rows.json")
    assert done.exit_code == 0, done.output
    for text in ("small", "nodes", "no communication"):
        assert f"<!-- {text} -->" in (tmp_path / "rows.svg").read_text()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 3 * 2 * 6  # models, nodes, codecs, searches
    for row in rows:
        assert set(row) >= FIELDS
    by = {(r["model"], r["nodes"], r["codec"], r["search"]): r["predicted_seconds"] for r in rows}
    for (model, nodes, codec, search), seconds in by.items():
        assert by[model, nodes, codec, "joint"] <= seconds * (1 + 1e-12), search


@pytest.mark.parametrize("name", ["rows.txt", "no/where/rows.svg"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_work(name, profiles):
    done = run("simulate", "--profiles", profiles, "--plot", name)
    assert done.exit_code == 2
    assert "Invalid value" in done.output


def test_simulate_a_measured_job(tmp_path):
    examples.profile().save(tmp_path / "profile.json")
    words = ["--profile", tmp_path / "profile.json", "--nodes", "2,4", "--inter", "100mbit,10gbit"]
    assert run("simulate", *words, "--json", tmp_path / "rows.json").exit_code == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["network"] for row in rows] == ["2x1 100mbit", "4x1 100mbit", "2x1 10gbit", "4x1 10gbit"]
    assert rows[2]["predicted_seconds"] < rows[0]["predicted_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "either --profile FILE"),
        (["plan", "--model", "small"], "--model needs --profiles"),
        (["plan", "--model", "smal", "--profiles", "FILE"], "did you mean 'small'"),
        (["plan", "--model", "small", "--profiles", "FILE", "--codec", "micro"], "costs on a GPU is not known"),
        (["plan", "--model", "small", "--profiles", "FILE", "--codec", "random_k", "--out", "x"], "cannot be run"),
        (["plan", "--model", "small", "--profiles", "FILE", "--inter", "quick"], "'quick' is not understood"),
        (["plan", "--model", "small", "--profiles", "FILE", "--search", "best"], "no search 'best'"),
        (["plan", "--profile", "FILE"], "is not a profile"),
        (["plan", "--profile", "MEASURED", "--search", "exact"], "planned by the search 'joint'"),
        (["plan", "--profile", "MEASURED", "--nodes", "4"], "needs the rate of the links"),
        (["plan", "--profile", "MEASURED", "--quality", "best"], "lossless, high, fast"),
        (["simulate"], "--model needs --profiles"),
        (["simulate", "--profiles", "FILE", "--nodes", "8..2"], "is not a list of numbers"),
        (["simulate", "--profiles", "FILE", "--search", "best"], "no search 'best'"),
        (["simulate", "--profile", "MEASURED"], "--profile needs --inter"),
    ],
)
def test_mistakes_are_named(profiles, tmp_path, words, message):
    measured = tmp_path / "measured.json"
    examples.profile().save(measured)
    done = run(*[{"FILE": profiles, "MEASURED": measured}.get(word, word) for word in words])
    assert done.exit_code == 1
    assert message in done.output.replace("\n", " ")


def test_one_tensor_and_one_rank(profiles):
    words = ["plan", "--model", "one", "--profiles", profiles]
    assert "1 │ only" in run(*words).output
    alone = run(*words, "--nodes", 1, "--gpus", 1)
    assert "there is nothing to exchange" in alone.output
    assert "scaling factor 1.000" in alone.output


def test_numbers():
    assert numbers("8") == [8]
    assert numbers("2,6") == [2, 6]
    assert numbers("2..16") == [2, 4, 8, 16]
    assert numbers("3..20") == [3, 4, 8, 16, 20]
    for text in ("", "a", "0", "4..2", "1,,2"):
        with pytest.raises(PlanError):
            numbers(text)
