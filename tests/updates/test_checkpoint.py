"""Saved states of local updates: the same bits for the same ranks, no jump for others, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import thinwire
from tests.ranks import run
from thinwire.errors import StateError

from .jobs import errors, make, make_here, momentum, parameters, settled, shared, train, train_here

CODECS = ["randomblock(ratio=8)", "topk(density=0.1)", "micro(density=0.1)", "int8"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("adam", [False, True])
def test_an_exact_state_gives_the_same_bits(codec: str, period: int, adam: bool) -> None:
    kind: dict[str, Any] = {"optimizer": torch.optim.Adam, "options": {"lr": 1e-3}} if adam else {}
    models, opt = make(3, codec, period=period, **kind)
    train(models, opt, range(7))
    opt.param_groups[0]["lr"] = 0.02
    state = opt.state_dict()
    train(models, opt, range(7, 12))
    again, resumed = make(3, codec, period=period, **kind)
    train(again, resumed, range(100, 102))
    resumed.load_state_dict(state)
    assert resumed.steps == 7
    train(again, resumed, range(7, 12))
    for rank in range(3):
        assert torch.equal(shared(opt, rank), shared(resumed, rank))
        assert torch.equal(errors(opt, rank), errors(resumed, rank))
        assert torch.equal(parameters(models[rank]), parameters(again[rank]))


def test_auto_goes_on_with_its_strength() -> None:
    models, opt = make(2, feedback=thinwire.Detached("auto"))
    train(models, opt, range(60))
    state = opt.state_dict()
    again, resumed = make(2, feedback=thinwire.Detached("auto"))
    resumed.load_state_dict(state)
    assert opt.strength == resumed.strength != 0.3
    assert torch.equal(parameters(models[1]), parameters(again[1]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("period", [1, 3])
def test_a_folded_state_goes_on_with_other_ranks_without_a_jump(codec: str, ranks: int, period: int) -> None:
    models, opt = make(4, codec, period=period)
    train(models, opt, range(8))
    y, mean = settled(opt), torch.stack([momentum(opt, r) for r in range(4)]).mean(0)
    before = [shared(opt), errors(opt, 3), parameters(models[3])]
    state = opt.state_dict("folded")
    for old, new in zip(before, [shared(opt), errors(opt, 3), parameters(models[3])], strict=True):
        assert torch.equal(old, new), "saving changes nothing"
    fewer, resumed = make(ranks, codec, period=period)
    train(fewer, resumed, range(2))
    resumed.load_state_dict(state)
    assert torch.allclose(settled(resumed), y, rtol=0, atol=1e-6)
    for rank in range(ranks):
        assert torch.equal(parameters(fewer[rank]), shared(resumed))
        assert not errors(resumed, rank).any()
        assert torch.allclose(momentum(resumed, rank), mean, atol=1e-6)
    # The next step of y is that of the job that went on, up to the batches.
    step = settled(resumed)
    train(fewer, resumed, range(8, 9))
    lr, after = 0.05, torch.stack([momentum(resumed, r).double() for r in range(ranks)]).mean(0)
    assert torch.allclose(settled(resumed), step - lr * after, rtol=0, atol=1e-6)


def _save_folded() -> dict[str, Any]:
    model, opt = make_here()
    train_here(model, opt, range(6))
    with opt.at("settled"):
        y = parameters(model)
    return {"state": opt.state_dict("folded"), "y": y}


def _load_folded(saved: dict[str, Any]) -> str:
    model, opt = make_here()
    opt.load_state_dict(saved["state"])
    with opt.at("settled"):
        assert torch.equal(parameters(model), saved["y"])
    train_here(model, opt, range(6, 9))
    return shared(opt).numpy().tobytes().hex()


def test_a_folded_state_of_real_ranks() -> None:
    saved = run(4, _save_folded)
    for other in saved[1:]:
        for key, value in saved[0]["state"].items():
            assert (
                torch.equal(value, other["state"][key])
                if isinstance(value, torch.Tensor)
                else value == other["state"][key]
            )
    for ranks in (2, 3):
        assert len(set(run(ranks, _load_folded, saved[0]))) == 1


def _resume(steps: int, state: list[dict[str, Any]] | None) -> tuple[dict[str, Any], str]:
    model, opt = make_here("randomblock(ratio=4)")
    if state is not None:
        opt.load_state_dict(state[dist.get_rank()])
        assert len({key.split(".")[0] for key in opt.state_dict()} - {"shared"}) == 1
    train_here(model, opt, range(opt.steps, steps))
    return opt.state_dict(), shared(opt).numpy().tobytes().hex() + parameters(model).numpy().tobytes().hex()


def test_an_exact_state_of_real_ranks() -> None:
    whole = run(2, _resume, 9, None)
    half = run(2, _resume, 5, None)
    rest = run(2, _resume, 9, [state for state, _ in half])
    assert [bits for _, bits in whole] == [bits for _, bits in rest]


def _changed(state: dict[str, Any], **fields: Any) -> str:
    return json.dumps({**json.loads(state["rank0.updates"]), **fields})


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    models, opt = make(2)
    train(models, opt, range(3))
    good = opt.state_dict()
    folded = opt.state_dict("folded")
    before = [shared(opt), errors(opt, 1), parameters(models[1])]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "holds nothing of rank 0"),
        ({**good, "rank1.residual.0.weight": torch.zeros(3)}, "rank1.residual.0.weight"),
        ({**good, "rank0.residual.2.weight": torch.full((64, 96), float("nan"))}, "not finite"),
        ({**good, "shared.0.bias": torch.zeros(96, dtype=torch.float64)}, "shared.0.bias"),
        ({**good, "rank0.updates": "{"}, "cannot be read"),
        ({**good, "rank0.updates": good["rank1.updates"]}, "is of rank 1"),
        ({**good, "rank0.updates": _changed(good, steps=-3)}, r"cannot be read: .*steps"),
        ({**good, "rank0.updates": _changed(good, strength=1.5)}, r"cannot be read: .*strength"),
        ({**good, "rank0.updates": _changed(good, format=2)}, "has format 2; version .* reads format 1"),
        ({**good, "rank0.updates": _changed(good, options=[{"lr": "fast"}])}, r"options\[0\]: lr is 'fast'"),
        ({**good, "rank0.updates": _changed(good, options=[{"momentum": -1.0}])}, r"options\[0\]: .*momentum"),
        ({**good, "rank0.optimizer.0.bias.momentum_buffer": torch.zeros(5)}, "does not fit the parameter"),
        ({key: value for key, value in folded.items() if key != "folded.shared.2.bias"}, "folded.shared.2.bias"),
        ({**folded, "folded.updates": good["rank0.updates"]}, "of one rank"),
    ]
    for state, message in cases:
        with pytest.raises(StateError, match=message):
            opt.load_state_dict(state)
        for old, new in zip(before, [shared(opt), errors(opt, 1), parameters(models[1])], strict=True):
            assert torch.equal(old, new)
    for other in (make(2, "randomblock(ratio=4)")[1], make(2, feedback=thinwire.Plain())[1]):
        with pytest.raises(StateError, match=r"is of rank 0 of 2|was saved with"):
            other.load_state_dict(good)


def _exactly(opt: thinwire.LocalUpdates, rank: int) -> list[torch.Tensor]:
    return [shared(opt, rank), errors(opt, rank)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("adam", [False, True])
def test_exact_states_of_all_ranks_go_on_with_others(codec: str, period: int, adam: bool) -> None:
    """The same as a folded state, without a collective."""
    kind: dict[str, Any] = {"optimizer": torch.optim.Adam, "options": {"lr": 1e-3}} if adam else {}
    models, opt = make(4, codec, period=period, **kind)
    train(models, opt, range(8))
    whole, expected = opt.state_dict(), opt.state_dict("folded")
    parts = [{k: v for k, v in whole.items() if k.startswith((f"rank{r}.", "shared."))} for r in range(4)]
    results = []
    for state in (expected, parts):
        other, resumed = make(3, codec, period=period, **kind)
        train(other, resumed, range(2))
        resumed.load_state_dict(state)
        results.append(resumed.state_dict())
        train(other, resumed, range(8, 12))
    for key, value in results[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(value, results[1][key], rtol=1e-6, atol=1e-7), key
    _, resumed = make(3, codec, period=period, **kind)
    with pytest.raises(StateError, match="that of rank 2 is missing"):
        resumed.load_state_dict([parts[0], parts[1], parts[3]])


def test_files_of_local_updates(tmp_path: Path) -> None:
    models, opt = make(2, "topk(density=0.1)", period=2)
    train(models, opt, range(5))
    opt.save(tmp_path)
    opt.save(tmp_path / "folded", kind="folded")
    again, resumed = make(2, "topk(density=0.1)", period=2)
    resumed.load(tmp_path)
    for one in ((models, opt), (again, resumed)):
        train(*one, range(5, 8))
    for rank in range(2):
        for left, right in zip(_exactly(opt, rank), _exactly(resumed, rank), strict=True):
            assert torch.equal(left, right)
    for source in (tmp_path, tmp_path / "folded"):
        _, more = make(3, "topk(density=0.1)", period=2)
        more.load(source)
        assert more.steps == 5
    mean = sorted((tmp_path / "folded").iterdir())
    assert [path.name for path in mean] == ["mean.safetensors"]


def _in_place(codec: str, folder: str, adam: bool, steps: int) -> None:
    """`torch.distributed.checkpoint` loads into what a new job says that it has, before its first step."""
    kind: dict[str, Any] = {"optimizer": torch.optim.Adam, "options": {"lr": 1e-3}} if adam else {}
    model, opt = make_here(codec, period=2, **kind)
    train_here(model, opt, range(steps))
    dcp.save({"opt": opt}, checkpoint_id=folder)
    dcp.save({"opt": opt.state_dict("folded")}, checkpoint_id=folder + "/folded")
    saved = opt.state_dict()
    train_here(model, opt, range(steps, steps + 4))
    again, resumed = make_here(codec, period=2, **kind)
    before = resumed.state_dict()
    assert before.keys() == saved.keys()
    dcp.load({"opt": resumed}, checkpoint_id=folder)
    found = resumed.state_dict()
    for key, value in saved.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key
    train_here(again, resumed, range(steps, steps + 4))
    assert torch.equal(parameters(model), parameters(again))
    assert torch.equal(shared(opt), shared(resumed))
    _, third = make_here(codec, period=2, **kind)
    room = third.state_dict("folded")
    dcp.load({"opt": room}, checkpoint_id=folder + "/folded")
    third.load_state_dict(room)
    assert third.steps == steps
    for group, inner in ((opt, opt.state), (third, third.state)):
        assert bool(steps) or group is opt or not any(inner.values()) or not adam


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("adam", [False, True])
def test_distributed_checkpoint(adam: bool, steps: int, tmp_path: Path) -> None:
    for number, codec in enumerate(("randomblock(ratio=8)", "dgc(momentum=0.9)", "int8")):
        run(2, _in_place, codec, str(tmp_path / str(number)), adam, steps)
