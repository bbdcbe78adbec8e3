"""Saved state: a resumed job has the same bits as one that went on, and what does not fit is refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire
from tests.engine.test_nonfinite import OWN, residuals, same
from tests.models import batch, digest, mlp, train, wrapped
from tests.ranks import run
from tests.support.profiles import tries
from thinwire.errors import StateError

VARIANTS = [*OWN, "topk(values='fp16')", "cast(dtype='fp16')", "strided"]
STEPS = 12


# -- resume ------------------------------------------------------------------------------------------------------------


def _job(codec: str, seed: int, **options: Any) -> tuple[Any, torch.optim.Optimizer, thinwire.Wire]:
    ddp = wrapped(mlp(seed), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return ddp, optimizer, thinwire.attach(ddp, codec, min_elements=100)


def _resume(codec: str, folder: str, saved: list[int], options: dict[str, Any]) -> str:
    """Train and save now and then; go on from each saved point in a new job, and compare at every step."""
    ddp, optimizer, wire = _job(codec, 0, **options)
    rank = dist.get_rank()
    history: list[tuple[str, Any]] = []

    def remember(step: int) -> None:
        if step in saved:
            parts = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
            torch.save(parts, Path(folder) / f"{step}.{rank}.pt")

    for step in range(STEPS):
        remember(step)
        train(ddp, optimizer, range(step, step + 1))
        history.append((digest(ddp), wire.state_dict()))
    for begin in saved:
        ddp, optimizer, wire = _job(codec, 1, **options)
        parts = torch.load(Path(folder) / f"{begin}.{rank}.pt", weights_only=True)
        ddp.module.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        wire.load_state_dict(parts["wire"])
        for step in range(begin, STEPS):
            train(ddp, optimizer, range(step, step + 1))
            assert (digest(ddp), step) == (history[step][0], step), f"resumed at {begin}"
            if begin > 1 or step > 3:  # a layout is found one step later by who resumes without
                assert same(wire.state_dict(), history[step][1]), f"resumed at {begin}"
    return history[-1][0]


@pytest.mark.parametrize("codec", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_resume_has_the_bits_of_going_on(codec: str, ranks: int, tmp_path: Path) -> None:
    # 1: no layout yet, and DDP's buckets change; 2: the layout has just been frozen. With dense and three ranks, 1 is as DDP
    # alone: the buckets of its second step are others in a job that begins again.
    saved = [1 if ranks == 3 and codec != "dense" else 2, random.Random(f"{codec} {ranks}").randrange(3, STEPS - 1)]
    results = run(ranks, _resume, codec, str(tmp_path), saved, {})
    assert len(set(results)) == 1


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"static_graph": True}, [1, 3, 5]),
        ({"find_unused_parameters": True}, [1, 2, 5]),
        ({"gradient_as_bucket_view": True}, [1, 2, 5]),
    ],
)
def test_resume_with_options_of_ddp(options: dict[str, Any], saved: list[int], tmp_path: Path) -> None:
    for codec in ("topk(density=0.05)", "dense"):
        early = [] if codec == "dense" else saved[:1]
        results = run(3, _resume, codec, str(tmp_path), [*early, *saved[1:]], options)
        assert len(set(results)) == 1


def _reload_while_dense(codec: str) -> None:
    """A state without a layout is refused by a wire that has one; a wire that has none takes it at any time."""
    ddp, optimizer, wire = _job(codec, 0)
    train(ddp, optimizer, range(1))
    state = wire.state_dict()
    assert all(not residual.any() for residual in residuals(wire).values())
    again, moments, late = _job(codec, 0)
    train(again, moments, range(1))
    late.load_state_dict(state)
    for one, other in ((ddp, optimizer), (again, moments)):
        train(one, other, range(1, 6))
    assert digest(ddp) == digest(again)
    assert (wire.stats()["dense_steps"], wire.stats()["steps"]) == (2, 4)
    assert same(wire.state_dict(), late.state_dict())
    with pytest.raises(StateError, match="before the layout was frozen"):
        late.load_state_dict(state)
    assert same(wire.state_dict(), late.state_dict())
    other, _, fresh = _job("cast", 0)
    fresh.load_state_dict(state)
    wider = thinwire.attach(wrapped(torch.nn.Linear(32, 10)), "cast", min_elements=100)
    with pytest.raises(StateError, match=r"'0\.bias' is only in the state"):
        wider.load_state_dict(state)


def test_a_state_from_before_the_layout_was_frozen() -> None:
    run(2, _reload_while_dense, "topk(density=0.05)")


def _resume_with_scaler() -> None:
    """The scale is not part of the wire's state: residuals are unscaled, so the new job may begin with another one."""
    ends = []
    for scale in (2.0**12, 2.0**3):
        ddp = wrapped(mlp(0))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        wire, saved = None, None
        for part in (range(5), range(5, 9)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12 if wire is None else scale)
            if wire is not None:
                state = wire.state_dict()
                saved = ddp.module.state_dict()
                ddp = wrapped(mlp(1))
                optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
                ddp.module.load_state_dict(saved)
            wire = thinwire.attach(ddp, "topk(density=0.05)", scaler=scaler, min_elements=100)
            if saved is not None:
                wire.load_state_dict(state)
            for step in part:
                inputs, targets = batch(step, dist.get_rank())
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(ddp(inputs), targets)).backward()
                scaler.step(optimizer)
                scaler.update()
        assert wire is not None
        ends.append((digest(ddp), residuals(wire)))
    assert same(ends[0], ends[1])


def test_resume_with_another_scale() -> None:
    run(2, _resume_with_scaler)


def _checkpoint(codec: str, folder: str) -> None:
    """Through `torch.distributed.checkpoint`, which takes equal keys of two ranks for replicas."""
    ddp, optimizer, wire = _job(codec, 0)
    train(ddp, optimizer, range(7))
    dcp.save({"model": ddp.module, "wire": wire}, checkpoint_id=folder)
    model, expected = digest(ddp), wire.state_dict()
    rank = dist.get_rank()
    assert all(key.startswith(f"rank{rank}.") for key in expected)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, residuals(wire))
    assert not any(torch.equal(everyone[0][name], everyone[1][name]) for name in everyone[0])
    loss = train(ddp, optimizer, range(7, 8))

    ddp, _, stateful = _job(codec, 1)
    dcp.load({"model": ddp.module, "wire": stateful}, checkpoint_id=folder)
    assert digest(ddp) == model
    assert same(stateful.state_dict(), expected)
    state = stateful.state_dict()
    assert train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(7, 8)) == loss

    _, _, other = _job(codec, 1)
    blank = other.state_dict()
    dcp.load({"wire": blank}, checkpoint_id=folder)
    other.load_state_dict(blank)
    assert same(other.state_dict(), state)


@pytest.mark.parametrize("codec", [name for name in VARIANTS if thinwire.parse(name).keeps_residual])
def test_distributed_checkpoint(codec: str, tmp_path: Path) -> None:
    run(2, _checkpoint, codec, str(tmp_path))


def _other_ranks_state(folder: str) -> None:
    ddp, optimizer, wire = _job("topk(density=0.05)", 0)
    train(ddp, optimizer, range(4))
    path = Path(folder) / "state.pt"
    if dist.get_rank() == 0:
        torch.save(wire.state_dict(), path)
    dist.barrier()
    state, before = torch.load(path, weights_only=True), wire.state_dict()
    if dist.get_rank() == 1:
        with pytest.raises(StateError, match=r"nothing of rank 1 \(it has: rank0\).*every rank must save"):
            wire.load_state_dict(state)
        assert same(wire.state_dict(), before)
        state = before
    wire.load_state_dict(state)
    train(ddp, optimizer, range(4, 6))


def test_the_state_of_another_rank_is_refused(tmp_path: Path) -> None:
    run(2, _other_ranks_state, str(tmp_path))


# -- refusals, all ranks in this process -------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {"first": (40, 50), "bias": (10,), "second": (3000,), "third": (6, 5, 5, 8)}


def _exchange(
    codec: str = "topk(density=0.05)",
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    world: int = 2,
    dtype: torch.dtype = torch.float32,
    steps: int = 0,
) -> thinwire.Exchange:
    named = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    exchange = thinwire.Exchange(named, codec, thinwire.LocalWorld(world), min_elements=64, group_bytes=16000)
    for step in range(steps):
        _step(exchange, step)
    return exchange


def _step(exchange: thinwire.Exchange, seed: int, bad: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        {
            info.name: torch.randn(info.shape, generator=generator).to(getattr(torch, info.dtype))
            for info in exchange.tensors
        }
        for _ in exchange.world.local_ranks
    ]
    if bad:
        tensors[0]["second"][17] = float("nan")
    exchange.reduce_(tensors)
    return tensors


def _refused(exchange: thinwire.Exchange, state: Any, text: str) -> None:
    before, executor = exchange.state_dict(), exchange.executor
    with pytest.raises(StateError, match=text):
        exchange.load_state_dict(state)
    assert exchange.executor is executor
    assert same(exchange.state_dict(), before)
    _step(exchange, 1)


def test_jobs_that_do_not_fit() -> None:
    state = _exchange(steps=3).state_dict()
    one = {key: value for key, value in state.items() if key.startswith("rank0")}
    _refused(_exchange(world=3), one, "is of 2 ranks, and this job has 3: .* that of rank 1 is missing; or .* 'mean'")
    _refused(_exchange(), one, r"nothing of rank 1 \(it has: rank0\)")
    _refused(_exchange(dtype=torch.float16), state, "'first' is float32 in the state and float16 in this model")
    other = SHAPES | {"second": (3001,), "third": (1, 2, 3)}
    _refused(_exchange(shapes=other), state, r"'second' has shape \(3000,\) in the state and \(3001,\) in this model")
    renamed = {name.replace("second", "two"): shape for name, shape in SHAPES.items()}
    _refused(_exchange(shapes=renamed), state, "has a tensor 'second' that this model does not have")
    _refused(_exchange(shapes=SHAPES | {"fourth": (9,)}), state, "lacks the tensor 'fourth' of this model")


def test_states_that_are_damaged() -> None:
    good = _exchange(steps=3).state_dict()
    exchange = _exchange(steps=5)
    residual = "rank1.residual.second"

    def text(**changes: Any) -> str:
        return json.dumps(json.loads(good["rank1.thinwire"]) | changes)

    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank1.thinwire": text(format=2)}, "has format 2; version .* reads format 1"),
        ({"rank1.thinwire": text(rank=0)}, "'rank1.thinwire' says of itself that it is of rank0 of 2"),
        ({"rank1.thinwire": text(world=1)}, "says of itself that it is of rank1 of 1"),
        ({"rank1.thinwire": text(weights=[[0.0]] * 4)}, r"Expected `float` > 0.0.*\$.weights"),
        (
            {"rank1.thinwire": text(carries=[True] * 4)},
            r"'rank1.carry.first' should be float32 \(40, 50\), but is missing",
        ),
        ({"rank1.thinwire": text(step=-1)}, r"Expected `int` >= 0.*\$.step"),
        ({"rank1.thinwire": text(surprise=1)}, "surprise"),
        ({"rank1.thinwire": text(capacities=[])}, "capacities of 0"),
        ({"rank1.thinwire": "{]"}, "'rank1.thinwire' cannot be read"),
        ({"rank1.thinwire": "[" * 100_000}, "'rank1.thinwire' cannot be read"),
        ({"rank1.thinwire": "\udcff"}, "'rank1.thinwire' cannot be read"),
        ({"rank1.thinwire": torch.zeros(3)}, "'rank1.thinwire' cannot be read"),
        ({residual: good[residual][1:]}, rf"'{residual}' should be float32 \(3000,\), but is float32 \(2999,\)"),
        ({residual: good[residual].double()}, "but is float64"),
        ({residual: good[residual].to_sparse()}, "but is float32 sparse"),
        ({residual: good[residual].to("meta")}, "but is float32 without data"),
        ({residual: "text"}, "but is str"),
        ({residual: None}, "but is missing"),
        ({residual: good[residual].clone().index_fill_(0, torch.tensor([7]), float("nan"))}, "not finite"),
        ({residual: good[residual].clone().index_fill_(0, torch.tensor([7]), float("inf"))}, "not finite"),
    ]
    for changes, message in cases:
        _refused(exchange, good | changes, message)
    _refused(exchange, {key: value for key, value in good.items() if key != residual}, "but is missing")
    _refused(exchange, {key: value for key, value in good.items() if "rank1" not in key}, "nothing of rank 1")
    _refused(exchange, {}, "no rank at all")
    _refused(exchange, {1: 2, None: 3}, "no rank at all")
    _refused(exchange, None, "a state is a dictionary")
    exchange.load_state_dict(good | {"rank7.thinwire": "others may be in it too"})
    assert same(exchange.state_dict(), good)


def test_layouts_that_are_damaged() -> None:
    good = _exchange(steps=3).state_dict()
    exchange = _exchange(steps=2)

    def changed(group: int, **changes: Any) -> dict[str, Any]:
        state = dict(good)
        for rank in range(2):
            meta = json.loads(good[f"rank{rank}.thinwire"])
            slots = {key.removeprefix("slot_"): value for key, value in changes.items() if key.startswith("slot_")}
            meta["layout"]["groups"][group] |= {k: v for k, v in changes.items() if not k.startswith("slot_")}
            if slots:
                meta["layout"]["groups"][group]["slots"][0] |= slots
            state[f"rank{rank}.thinwire"] = json.dumps(meta)
        return state

    _refused(exchange, changed(0, codec="cast"), "'group 0' has codec cast in a state of topk")
    _refused(exchange, changed(0, codec="__import__('os')"), "'group 0' has codec __import__")
    _refused(exchange, changed(0, elements=10**15), "'group 0' has 1000000000000000 elements")
    _refused(exchange, changed(0, slots=[]), "'group 0' has 2010 elements in the state, its tensors have 0")
    _refused(exchange, changed(0, slot_offset=-5), r"Expected `int` >= 0.*\$.layout.groups\[0\].slots\[0\].offset")
    _refused(exchange, changed(0, slot_offset=5), "'first' has 2000 elements at offset 5")
    _refused(exchange, changed(0, slot_elements=10**15), "2000 at offset 0 would be right")
    _refused(exchange, changed(0, slot_role="ride"), "'first' has a place in the state that no layout gives it: ride")
    _refused(exchange, changed(0, slot_role="elsewhere"), "no layout gives it: elsewhere")
    _refused(exchange, changed(0, slot_role="nowhere"), "cannot be read")
    _refused(exchange, changed(0, slot_kind="conv"), "'first' is of kind conv in the state and dense in this model")
    one_sided = good | {"rank0.thinwire": changed(0, name="other")["rank0.thinwire"]}
    _refused(exchange, one_sided, "different layouts")


def test_a_hostile_capacity_does_not_take_the_memory() -> None:
    exchange = _exchange(steps=2)
    state = exchange.state_dict()
    for rank in range(2):
        meta = json.loads(state[f"rank{rank}.thinwire"])
        meta["capacities"] = [[[2**53] for _ in kinds] for kinds in meta["capacities"]]
        state[f"rank{rank}.thinwire"] = json.dumps(meta)
    exchange.load_state_dict(state)
    _step(exchange, 3)
    assert exchange.stats()["memory_bytes"] < 100 * 6000 * 4


def test_the_state_goes_round() -> None:
    for codec in VARIANTS:
        exchange = _exchange(codec, steps=4)
        exchange.guard(torch.optim.SGD([torch.zeros(1)]))
        _step(exchange, 4, bad=True)
        assert exchange.stats()["skipped"] == 1
        state = exchange.state_dict()
        copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        other = _exchange(codec)
        other.load_state_dict(state)
        assert same(other.state_dict(), state)
        assert other.stats()["skipped"] == 1
        for seed in (7, 8):
            assert same(_step(exchange, seed), _step(other, seed)), codec
        assert same(state, copies), "a state is a copy: training does not change it"
        assert other.stats()["skipped"] == 1


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=6),
    st.just([]),
    st.just({}),
    st.lists(st.integers(), max_size=3),
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, part in inner for deeper in _paths(part, (*path, key)))]


def _mutate(data: st.DataObject, state: dict[str, Any]) -> None:
    key = data.draw(st.sampled_from(sorted(state)))
    action = data.draw(st.sampled_from(["remove", "replace", "rename", "json", "json", "json", "text", "tensor"]))
    value = state[key]
    if action == "remove":
        del state[key]
    elif action == "replace":
        state[key] = data.draw(junk)
    elif action == "rename":
        state[data.draw(st.text(max_size=5)) + key] = state.pop(key)
    elif action == "tensor":
        state[key] = torch.zeros(data.draw(st.lists(st.integers(0, 50), max_size=3)))
    elif isinstance(value, str) and action == "text":
        at = data.draw(st.integers(0, max(0, len(value) - 1)))
        state[key] = value[:at] + data.draw(st.text(max_size=2)) + value[at + data.draw(st.integers(0, 3)) :]
    elif isinstance(value, str):
        try:
            meta = json.loads(value)
        except ValueError:
            return
        path = data.draw(st.sampled_from(_paths(meta)))
        target = {"": meta}
        for step in ("", *path)[:-1]:
            target = target[step]
        target[("", *path)[-1]] = data.draw(junk)
        state[key] = json.dumps(target[""] if not path else meta)


@pytest.mark.parametrize("codec", ["laplace", "strided", "laplace via K", "micro(density=0.1)"])
@settings(max_examples=tries(100), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_is_refused_or_harmless(codec: str, data: st.DataObject) -> None:
    exchange = _exchange(codec, steps=2)
    state = _exchange(codec, steps=3).state_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, state)
    before, executor = exchange.state_dict(), exchange.executor
    try:
        exchange.load_state_dict(state)
    except StateError:
        assert exchange.executor is executor
        assert same(exchange.state_dict(), before)
    _step(exchange, 5)
    assert all(value.isfinite().all() for value in exchange.state_dict().values() if isinstance(value, Tensor))
