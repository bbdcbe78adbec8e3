"""What was written before is read, and gives the same as then.

Bits are compared wherever only Numba's kernels (no fast math, no fused multiply-add) and single operations of torch are in the
way. Numbers that a codec remembers in float64 may differ by the last digit of a logarithm or a power, which are those of the C
library: 1e-12. Where matrix products are in the way (`lowrank`), 1e-6; where an optimizer of torch has roots, or a strength
that is no power of two, what the case says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import thinwire
from tests.ranks import run

from . import cases, frozen, internals, jobs
from .cases import (
    AFTER,
    BEFORE,
    CHECKPOINTS,
    FILES,
    LOCALS,
    OTHER_RANKS,
    REGISTERED,
    STEPS,
    TRAJECTORIES,
    Case,
    Local,
    chosen_for_mean,
)

DIGITS = 1e-12


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As the files were written; and small products of matrices take longest with threads that wait for a busy core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Records:
    """A JSON file of digests, and the tensors beside it."""

    def __init__(self, name: str) -> None:
        self.records: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text())
        self.tensors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(FILES / f"{name}.safetensors").items():
            record, place = key.split("|")
            self.tensors.setdefault(record, {})[place] = tensor

    def compare(self, key: str, found: Mapping[str, Any], tolerance: float) -> None:
        expected = self.records[key]
        assert len(found["digests"]) == len(expected["digests"])
        for place, (mine, theirs) in enumerate(zip(found["digests"], expected["digests"], strict=True)):
            assert mine == theirs, f"{key}: step {place} of these gives other bits"
        assert found["bytes"] == expected["bytes"], f"{key}: bytes"
        cases.close(found["kept"], self.tensors.get(key, {}), tolerance, key)


@pytest.fixture(scope="module")
def trajectories() -> Records:
    return Records("trajectories")


@pytest.fixture(scope="module")
def checkpoints() -> Records:
    return Records("checkpoints")


def test_everything_is_frozen(trajectories: Records, checkpoints: Records) -> None:
    """Every codec has a case, every case a record, every record a case: a codec that comes new gets golden files as well."""
    own = {name for name, kind in internals.CODECS.items() if kind.__module__.startswith("thinwire.")}
    assert own == set(REGISTERED)
    assert set(trajectories.records) == {f"{case.name} {case.shapes}" for case in TRAJECTORIES} | {
        local.slug for local in LOCALS
    }
    means = {f"{case.slug} mean" for case in chosen_for_mean()}
    folded = {f"{local.slug} folded" for local in LOCALS if local.name in cases.FOLDED}
    exact = {case.slug for case in CHECKPOINTS} | {local.slug for local in LOCALS}
    assert set(checkpoints.records) == exact | means | folded
    assert {path.name for path in (FILES / "checkpoints").iterdir()} == exact


# -- trajectories ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TRAJECTORIES, ids=lambda case: f"{case.name} {case.shapes}")
def test_trajectory(case: Case, trajectories: Records) -> None:
    found = cases.run_case(case, case.exchange(), range(STEPS))
    trajectories.compare(f"{case.name} {case.shapes}", found, case.tolerance)


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
def test_trajectory_of_local_updates(local: Local, trajectories: Records) -> None:
    trajectories.compare(local.slug, cases.run_local(local, *local.make(), range(STEPS)), local.tolerance)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: case.name)
def test_checkpoint(case: Case, checkpoints: Records) -> None:
    folder = FILES / "checkpoints" / case.slug
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"rank{rank}-of-{case.ranks}.safetensors" for rank in range(case.ranks)]
    stored = cases.stored_state(folder)
    resumed = case.exchange()
    resumed.load(folder)
    cases.same_state(resumed.state_dict(), stored, 0.0, 0.0, "what was loaded is what is in the files")
    found = cases.run_case(case, resumed, range(BEFORE, BEFORE + AFTER))
    record = checkpoints.records[case.slug]
    found["bytes"] = record[
        "bytes"
    ]  # a mean over the steps since the load; `test_state_is_written_as_before` compares it
    checkpoints.compare(case.slug, found, case.tolerance)


@pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: case.name)
def test_state_is_written_as_before(case: Case, checkpoints: Records, tmp_path: Path) -> None:
    """The same run, from its beginning: keys, names of fields, their order, roles, names of groups, file names."""
    exchange = case.exchange()
    for _ in case.steps(exchange, range(BEFORE)):
        pass
    stored = cases.stored_state(FILES / "checkpoints" / case.slug)
    if cases.changed(case.text):
        cases.same_form(exchange.state_dict(), stored, case.name)
        return
    texts = case.tolerance or DIGITS
    cases.same_state(exchange.state_dict(), stored, case.tolerance, texts, case.name)
    found = cases.run_case(case, exchange, range(BEFORE, BEFORE + AFTER))
    checkpoints.compare(case.slug, found, case.tolerance)


@pytest.mark.parametrize("case", chosen_for_mean(), ids=lambda case: case.name)
def test_checkpoint_of_the_mean(case: Case, checkpoints: Records) -> None:
    folder = FILES / "checkpoints" / case.slug
    assert [path.name for path in (folder / "mean").iterdir()] == ["mean.safetensors"]
    ranks = OTHER_RANKS if case.nodes == 1 else 0
    other = case.exchange(ranks)
    other.load(folder / "mean")
    found = cases.run_case(case, other, range(BEFORE, BEFORE + AFTER), ranks)
    checkpoints.compare(f"{case.slug} mean", found, case.tolerance)
    exact = case.exchange()
    exact.load(folder)
    stored = cases.stored_state(folder / "mean")
    cases.same_state(exact.state_dict("mean"), stored, case.tolerance, case.tolerance or DIGITS, case.name)


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
def test_checkpoint_of_local_updates(local: Local, checkpoints: Records) -> None:
    folder = FILES / "checkpoints" / local.slug
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert names == [f"rank{rank}-of-{local.ranks}.safetensors" for rank in range(local.ranks)]
    models, opt = local.make()
    opt.load(folder)
    stored = cases.stored_state(folder)
    cases.same_state(opt.state_dict(), stored, 0.0, 0.0, "what was loaded is what is in the files")
    for rank, model in enumerate(models):  # all that only the parameters themselves hold between two exchanges
        cases.close({"seen": model.seen}, {"seen": stored[f"rank{rank}.buffer.seen"]}, 0.0, local.name)
    after = range(BEFORE + 1, BEFORE + 1 + AFTER)
    found = cases.run_local(local, models, opt, after)
    found["bytes"] = checkpoints.records[local.slug]["bytes"]
    checkpoints.compare(local.slug, found, local.tolerance)


@pytest.mark.parametrize("local", LOCALS, ids=lambda local: local.name)
def test_state_of_local_updates_is_written_as_before(local: Local) -> None:
    models, opt = local.make()
    for _ in local.steps(models, opt, range(BEFORE + 1)):
        pass
    stored = cases.stored_state(FILES / "checkpoints" / local.slug)
    if cases.changed(local.codec):
        cases.same_form(opt.state_dict(), stored, local.name)
    else:
        cases.same_state(opt.state_dict(), stored, local.tolerance, local.tolerance or DIGITS, local.name)


@pytest.mark.parametrize("name", cases.FOLDED)
def test_folded_checkpoint(name: str, checkpoints: Records) -> None:
    (local,) = [local for local in LOCALS if local.name == name]
    folder = FILES / "checkpoints" / local.slug
    others, other = local.make(OTHER_RANKS)
    other.load(folder / "folded")
    found = cases.run_local(local, others, other, range(BEFORE + 1, BEFORE + 1 + AFTER))
    found["bytes"] = checkpoints.records[f"{local.slug} folded"]["bytes"]
    checkpoints.compare(f"{local.slug} folded", found, local.tolerance)
    _, exact = local.make()
    exact.load(folder)
    stored = cases.stored_state(folder / "folded")
    cases.same_state(exact.state_dict("folded"), stored, local.tolerance, local.tolerance or DIGITS, name)


def test_states_go_by_dictionary_too() -> None:
    """`load_state_dict` of what the files hold, of all ranks at once and as a list."""
    (case,) = [case for case in CHECKPOINTS if case.name == "micro(density=0.05) on 1x2"]
    stored = cases.stored_state(FILES / "checkpoints" / case.slug)
    parts = [{key: value for key, value in stored.items() if key.startswith(f"rank{rank}.")} for rank in range(2)]
    for given in (stored, parts):
        exchange: thinwire.Exchange = case.exchange()
        exchange.load_state_dict(given)
        cases.same_state(exchange.state_dict(), stored, 0.0, 0.0, case.name)


# -- real ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "by_dcp"), [*((kind, False) for kind in jobs.KINDS), ("dcp", True)])
def test_states_of_real_ranks(kind: str, by_dcp: bool) -> None:
    """DDP: before there is a layout, with a plan, a scaler, auto, on the path of GPUs, and as dcp has written it."""
    folder = FILES / "ranks" / kind
    for rank, (arrays, digests) in enumerate(run(2, jobs.resume, kind, str(folder), by_dcp)):
        assert digests == frozen.stored("ranks")[kind], f"rank {rank}"
        state = {key: value if isinstance(value, str) else torch.from_numpy(value) for key, value in arrays.items()}
        if kind != "dcp":
            assert sorted(path.name for path in folder.iterdir()) == [f"rank{r}-of-2.safetensors" for r in (0, 1)]
            stored = cases.stored_state(folder)
            own = {key: value for key, value in stored.items() if key.startswith(f"rank{rank}.")}
            cases.same_state(state, own, 0.0, 0.0, f"rank {rank}")


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_ranks_write_what_they_wrote(kind: str, tmp_path: Path) -> None:
    first, second = run(2, jobs.write, kind, str(tmp_path / kind))
    assert first == second
    if not jobs.changed(kind):
        assert first == frozen.stored("ranks")[kind]
    if kind != "dcp":
        found, stored = (cases.stored_state(folder / kind) for folder in (tmp_path, FILES / "ranks"))
        if jobs.changed(kind):
            cases.same_form(found, stored, kind)
        else:
            cases.same_state(found, stored, 0.0, DIGITS, kind)


def test_a_journal_is_written_as_before(tmp_path: Path) -> None:
    """The same files, and of each line the same fields, with values of the same kind; times are not compared."""
    run(2, jobs.log, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]
    assert sorted(path.name for path in (FILES / "journal").iterdir()) == ["rank-0.jsonl", "rank-1.jsonl"]
    for path in tmp_path.iterdir():
        lines, expected = (
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in (path, FILES / "journal" / path.name)
        )
        # Two threads write: the lines of one kind are in order, those of several may be in any.
        lines, expected = sorted(lines, key=lambda line: line["kind"]), sorted(expected, key=lambda line: line["kind"])
        assert [line["kind"] for line in lines] == [line["kind"] for line in expected]
        for mine, theirs in zip(lines, expected, strict=True):
            assert list(mine)[: len(theirs)] == list(theirs), "fields, and their order; new ones come last"
            assert frozen.shape_of({key: mine[key] for key in theirs}) == frozen.shape_of(theirs), mine
            for key in ("step", "target", "skipped", "path", "codec", "what", "values"):
                assert mine.get(key) == theirs.get(key), (key, mine)
            if mine["kind"] == "step":  # the plan has a group of `micro`, see `cases.changed`
                assert mine["bytes"] == pytest.approx(theirs["bytes"], rel=0.1), mine
                assert (mine.get("density") is None) == (theirs.get("density") is None), mine
                if theirs.get("density") is not None:
                    assert mine["density"] == pytest.approx(theirs["density"], rel=1.0), (mine, theirs)
            else:
                assert mine.get("bytes") == theirs.get("bytes"), mine
                assert mine.get("density") == theirs.get("density"), mine
            if mine["kind"] == "layout":
                assert mine["groups"] == theirs["groups"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_profile_and_a_plan_are_read_and_written(tmp_path: Path) -> None:
    profile = internals.Profile.load(FILES / "profile.json")
    profile.save(tmp_path / "profile.json")
    assert (tmp_path / "profile.json").read_bytes() == (FILES / "profile.json").read_bytes()
    for name in ("plan.json", "ranks/plan.json"):
        thinwire.Plan.load(FILES / name).save(tmp_path / "plan.json")
        assert (tmp_path / "plan.json").read_bytes() == (FILES / name).read_bytes()


def test_what_auto_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan is kept for the next run, beside which profile, and that it is found there."""
    expected = json.loads((FILES / "cache.json").read_text())
    profile = internals.Profile.load(FILES / "profile.json")
    plan = thinwire.Plan.load(FILES / "plan.json")
    tensors = [internals.TensorInfo(t.name, t.shape, t.dtype, t.kind) for t in profile.tensors]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for quality, place in expected["places"].items():
        assert internals.kept.place(tensors, profile.cluster, quality) == tmp_path / place
    assert internals.kept.load(FILES / "cache" / "mine.json", plan.quality, lambda plan: None) == (plan, profile)
    internals.kept.save(tmp_path / "new" / "mine.json", plan, profile)
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == ["mine.json", expected["profile"]]
    for name in names:
        assert (tmp_path / "new" / name).read_bytes() == (FILES / "cache" / name).read_bytes()


@pytest.mark.parametrize("name", ["lines.jsonl", "journal/rank-0.jsonl", "journal/rank-1.jsonl"])
def test_a_journal_is_read(name: str) -> None:
    """Every line, and what is read is written the same: names of kinds, fields and their order, lists in place of objects.

    Fields that came later follow, and are null.
    """
    written = (FILES / name).read_bytes().splitlines()
    lines = list(internals.journal.Reader(FILES / name).read())
    for line, before in zip(lines, written, strict=True):
        known, fields = json.loads(before), json.loads(internals.journal.encode(line))
        assert not any(value is not None for key, value in fields.items() if key not in known)
        again = {key: value for key, value in fields.items() if key in known}
        assert list(again) == list(known)
        assert again == known
    assert {json.loads(line)["kind"] for line in written} == {"start", "layout", "step", "event", "note", "trace"}
    assert internals.journal.read(FILES / name).steps


def test_a_folder_of_journals_is_read() -> None:
    found = internals.journal.files(FILES / "journal")
    assert [path.name for path in found] == ["rank-0.jsonl", "rank-1.jsonl"]


def test_what_reports_say_of_a_journal(tmp_path: Path) -> None:
    assert json.loads(json.dumps(frozen.reported(tmp_path))) == frozen.stored("reported")


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages() -> None:
    expected = frozen.stored("messages")
    assert json.loads(json.dumps(frozen.messages())) == expected["packed"]
    found = frozen.codec_messages()
    assert set(found) == set(expected["codecs"])
    for text, records in expected["codecs"].items():
        for step, record in enumerate(records):
            assert found[text][step] == record, f"{text}, step {step}"
