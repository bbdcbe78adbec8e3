"""Codecs in chains: nothing is lost over all residuals, replicas are equal, states resume, chains change."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.codecs.laws import Tensors, gradients
from tests.models import batch, digest, mlp, train, wrapped
from tests.ranks import run
from thinwire.chains import tree
from thinwire.chains.chain import choose
from thinwire.engine.executor import Executor
from thinwire.engine.layout import build, describe
from thinwire.engine.rank_state import Safety
from thinwire.errors import AttachError

# b is small and lies between others; c is cut by every border there is.
SHAPES = {"a": (30, 41), "b": (7,), "c": (50, 53), "d": (6, 5, 3, 3), "e": (0, 3)}
OPTIONS: dict[str, Any] = {"min_elements": 50}
CODECS = ["topk(density=0.05)", "int8(block=100)", "adacomp(bin_conv=10, bin_dense=30)"]
LETTERS = [letter for letter, text in tree.NAMED.items() if tree.parse(text).compressions]
ALL = [f"{codec} via {letter}" for codec in CODECS for letter in LETTERS]
OTHERS = [
    "topk(density=0.05, values='fp16') via comp iGc dec comp eAGc dec iB",
    "topk(density=0.05) via iR comp eGc dec comp eBc iBc dec",
    "topk(density=0.05) via comp fGc fBc dec",
    "dgc(density=0.05, momentum=0.0) via iRS comp eAGc dec comp iAGc dec",
    "dgc(density=0.05, momentum=0.0) via comp iA2Ac eAGc dec comp iAGc dec",
    "sidco(density=0.05) via D",
    "laplace(density=0.05) via H",
    "sign via K",
    "dense via A",
    "micro(density=0.05, values='fp32') via iRS comp eARc dec iAG",
    "micro(density=0.05) via iR comp eARc dec iB",
    "randomblock(ratio=4.0) via iRS comp eARc dec iAG",
    "randomk(density=0.1) via iRS comp eARc dec iAG",
    "lowrank(rank=2) via iRS comp eARc dec iAG",
    "cast(dtype='fp16') via iRS comp eARc dec iAG",
]


def _empty() -> Tensors:
    return {name: torch.empty(shape) for name, shape in SHAPES.items()}


def _left(rank_states: Any) -> Tensors:
    """What all these ranks have not sent yet, carried parts included."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank_state in rank_states:
        for name, residual in rank_state.residuals.named():
            total[name] += residual.double()
        for group in rank_state.groups:
            for p in group.info.parameters if group.inherited is not None else ():
                total[p.name] += group.inherited[p.offset : p.offset + p.elements].view(p.shape).double()
    return total


def _check_step(before: Tensors, given: list[Tensors], results: list[Tensors], after: Tensors, text: str) -> None:
    """What came in and what was left is what came out and is left, to a few roundings."""
    for name, result in results[0].items():
        for other in results[1:]:
            assert torch.equal(result.view(torch.int32), other[name].view(torch.int32)), f"{text}: {name}"
        ranks = len(given)
        came = before[name] + torch.stack([tensors[name].double() for tensors in given]).sum(0)
        went = after[name] + ranks * result.double()
        size = before[name].abs() + after[name].abs() + sum(tensors[name].double().abs() for tensors in given)
        rounding = 1e-2 if "cast" in text else 6e-3 if "micro" in text and "fp32" not in text else 2e-6
        if size.numel():
            allowed = rounding * (size.max() if "lowrank" in text else size + ranks * result.double().abs()) + 1e-6
            assert bool(((came - went).abs() <= allowed).all()), (
                f"{text}: {float((came - went).abs().max())} of {name}"
            )


@pytest.mark.parametrize(("ranks", "each"), [(4, 2), (6, 3)])
@pytest.mark.parametrize("text", [*ALL, *OTHERS])
def test_nothing_is_lost_and_replicas_are_equal(text: str, ranks: int, each: int) -> None:
    exchange = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(ranks, each), **OPTIONS)
    assert exchange.executor is not None
    rank_states = exchange.executor.rank_states
    sent = False
    for step in range(5):
        given = gradients(SHAPES, ranks, "heavy" if step == 2 else "normal", step)
        before = _left(rank_states)
        results = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
        exchange.reduce_(results)
        _check_step(before, given, results, _left(rank_states), text)
        sent |= bool(results[0]["c"].any())
    assert sent
    # Comps that come after everything was added are held alike by all nodes.
    for rank_state in rank_states:
        for group, other in zip(
            rank_state.residuals.held, rank_states[rank_state.rank % each].residuals.held, strict=True
        ):
            for held, twin in zip(group, other, strict=True):
                if held.weight != 1.0:
                    assert torch.equal(held.flat, twin.flat)


def _void(exchange: thinwire.Exchange, ranks: int) -> None:
    given = gradients(SHAPES, ranks, "normal", 99)
    given[ranks - 1]["c"][3, 3] = float("nan")
    exchange.reduce_(given)
    assert exchange.executor is not None
    assert all(rank_state.last_void for rank_state in exchange.executor.rank_states)
    assert all(bool(tensor.isnan().all()) for tensors in given for tensor in tensors.values() if tensor.numel() > 100)


@pytest.mark.parametrize("text", [*ALL[::2], *OTHERS])
def test_a_void_step_loses_nothing(text: str) -> None:
    """Twice the same gradients with a void step of theirs between: only finite gradients stay, none twice."""
    exchange = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(4, 2), **OPTIONS)
    assert exchange.executor is not None
    rank_states = exchange.executor.rank_states
    for step in range(3):
        exchange.reduce_(gradients(SHAPES, 4, "normal", step))
    if text.startswith(("dense", "cast")):
        return
    before = _left(rank_states)
    late = [[held.flat.clone() for held in each[1:]] for m in rank_states for each in m.residuals.held]
    _void(exchange, 4)
    after = _left(rank_states)
    given = [
        {name: tensor.double() for name, tensor in tensors.items()} for tensors in gradients(SHAPES, 4, "normal", 99)
    ]
    allowed = 1e-3 if "16" in text or "micro" in text or "lowrank" in text else 1e-4
    for name in dict(rank_states[0].residuals.named()):
        # What lies in a tile with a value that is not finite is left out: of the rank, its node, or all of them.
        possible = torch.stack([before[name] + sum(given[r][name] for r in range(count)) for count in (4, 3, 2, 0)])
        if not after[name].numel():
            continue
        assert float((possible - after[name]).abs().min(0).values.max()) < allowed, name
    now = [[held.flat for held in each[1:]] for m in rank_states for each in m.residuals.held]
    assert all(torch.equal(a, b) for x, y in zip(late, now, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("text", ["topk(density=0.05) via B", "adacomp via H", "int8", "topk(density=0.05) via I"])
def test_a_protected_void_step_changes_nothing(text: str) -> None:
    """With a scaler: residuals are as before, bit for bit, and so is the step that follows."""
    tensors = [describe(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    codec, chain = choose(text)
    ends = []
    for void in (False, True):
        executor = Executor(
            thinwire.LocalWorld(4, 2),
            build([tensors], codec, chain=chain, min_elements=50),
            safety=Safety(protected=True),
        )
        for step in (0, 1, 2, 3):
            given = gradients(SHAPES, 4, "normal", step)
            buffers = [torch.cat([tensor.reshape(-1) for tensor in one.values()]) for one in given]
            if void and step == 2:
                spoilt = [buffer.clone() for buffer in buffers]
                spoilt[2][700] = float("inf")
                executor.submit(tuple(SHAPES), spoilt, lambda _: None)
                assert all(rank_state.last_void for rank_state in executor.rank_states)
                for rank_state in executor.rank_states:
                    rank_state.step -= 1  # top-k cuts by step
            executor.submit(tuple(SHAPES), buffers, lambda _: None)
        ends.append((_hash({"all": buffers[1]}), [_hash(dict(m.residuals.named())) for m in executor.rank_states]))
    assert ends[0] == ends[1]


def test_a_parameter_that_no_rank_used_is_not_sent() -> None:
    tensors = [describe(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    codec, chain = choose("topk(density=0.2) via H")
    layout = build([tensors], codec, chain=chain, min_elements=50)
    executor = Executor(thinwire.LocalWorld(4, 2), layout, safety=Safety(tracks_unused=True))
    for step in range(4):
        given = gradients(SHAPES, 4, "normal", step)
        before = _left(executor.rank_states)
        unused = [["c"]] * 4 if step == 2 else [["c"], [], [], []] if step == 3 else [[]] * 4
        for one, names in zip(given, unused, strict=True):
            for name in names:
                one[name].zero_()
        buffers = [torch.cat([tensor.reshape(-1) for tensor in one.values()]) for one in given]
        executor.submit(tuple(SHAPES), buffers, lambda _: None, unused)
        after = _left(executor.rank_states)
        assert torch.equal(before["c"], after["c"]) == (step == 2)
        assert not torch.equal(before["a"], after["a"])


# -- real ranks ----------------------------------------------------------------------------------------------------------


def _nodes(each: int) -> None:
    """Let this process believe that `each` ranks share a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(each)
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % each)


def _forget_nodes() -> None:
    os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = os.environ["WORLD_SIZE"], os.environ["RANK"]


def _hash(tensors: Tensors) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def _on_gloo(texts: list[str], steps: int) -> dict[str, list[str]]:
    _nodes(2)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        found = {}
        for text in texts:
            exchange = thinwire.Exchange(_empty(), text, **OPTIONS)
            found[text] = []
            for step in range(steps):
                given = gradients(SHAPES, world, "normal", step)[rank]
                exchange.reduce_(given)
                found[text].append(_hash({name: given[name] for name in SHAPES if name != "b"}))
            found[text].append(_hash({k: v for k, v in exchange.state_dict().items() if isinstance(v, Tensor)}))
            exchange.close()
        return found
    finally:
        _forget_nodes()


def test_local_world_gives_the_same_bits_as_gloo() -> None:
    """All sums of these chains are in rank order, so that it does not matter who carries them.

    With the test above, which is on the same gradients: nothing is lost on gloo, and replicas are equal.
    """
    texts = [text for text in [*ALL, *OTHERS[:1], *OTHERS[4:8]] if text != "dense via A"]
    steps = 2
    gloo = run(4, _on_gloo, texts, steps)
    for text in texts:
        exchange = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(4, 2), **OPTIONS)
        for step in range(steps):
            given = gradients(SHAPES, 4, "normal", step)
            exchange.reduce_(given)
            for rank, tensors in enumerate(given):
                mine = _hash({name: tensors[name] for name in SHAPES if name != "b"})
                assert gloo[rank][text][step] == mine, f"{text}, step {step}, rank {rank}"
        for rank in range(4):
            state = {
                key: value
                for key, value in exchange.state_dict().items()
                if isinstance(value, Tensor) and key.startswith(f"rank{rank}.")
            }
            assert gloo[rank][text][steps] == _hash(state), f"{text}, state of rank {rank}"


def _conserved(texts: list[str]) -> None:
    """Gloo adds in an order of its own."""
    _nodes(2)
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        for text in texts:
            exchange = thinwire.Exchange(_empty(), text, **OPTIONS)
            assert exchange.executor is not None
            for step in range(2):
                before = _left(exchange.executor.rank_states)
                given = gradients(SHAPES, world, "normal", step)
                mine = {name: tensor.clone() for name, tensor in given[rank].items()}
                exchange.reduce_(mine)
                after = _left(exchange.executor.rank_states)
                for left in (before, after):
                    for tensor in left.values():
                        dist.all_reduce(tensor)
                everyone: list[Any] = [None] * world
                dist.all_gather_object(everyone, mine)
                _check_step(before, given, everyone, after, text)
            exchange.close()
    finally:
        _forget_nodes()


def test_nothing_is_lost_on_gloo_where_it_adds_itself() -> None:
    run(4, _conserved, [*OTHERS[1:4], *OTHERS[8:]])


# -- saved states --------------------------------------------------------------------------------------------------------

SAVED = [
    "topk(density=0.05) via B",
    "int8 via K",
    "dgc(density=0.05, momentum=0.9) via G",
    "adacomp(bin_conv=10, bin_dense=30) via H",
    "micro(density=0.05) via iRS comp eARc dec iAG",
    "laplace(density=0.05) via D",
]


@pytest.mark.parametrize("text", SAVED)
def test_a_resumed_job_has_the_bits_of_one_that_went_on(text: str) -> None:
    def steps(exchange: thinwire.Exchange, numbers: range) -> list[str]:
        found = []
        for step in numbers:
            given = gradients(SHAPES, 4, "normal", step)
            exchange.reduce_(given)
            found.append(_hash(given[0]))
        return found

    first = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(4, 2), **OPTIONS)
    steps(first, range(4))
    state = first.state_dict()
    expected = steps(first, range(4, 8))
    second = thinwire.Exchange(_empty(), text, thinwire.LocalWorld(4, 2), **OPTIONS)
    steps(second, range(2))
    second.load_state_dict(state)
    assert steps(second, range(4, 8)) == expected
    # Another chain keeps what was not sent; what its codec has learnt begins anew.
    other = thinwire.Exchange(
        _empty(), text.split(" via ")[0], thinwire.LocalWorld(4, 2), chain=_another(text), **OPTIONS
    )
    other.load_state_dict(state)
    second.load_state_dict(state)
    assert other.executor is not None
    assert second.executor is not None
    left, right = _left(other.executor.rank_states), _left(second.executor.rank_states)
    assert all(torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-5) for name in SHAPES)


def _another(text: str) -> str:
    return "comp fARc dec" if "eARc" in text else "J" if text.endswith("B") else "B"


def _ddp(chain: str) -> list[str]:
    """A model in training, saved and resumed; the state before the layout is known has the same tensors."""
    _nodes(2)
    try:
        ddp = wrapped(mlp(0))
        wire = thinwire.attach(ddp, "topk(density=0.05)", chain=chain, min_elements=100)
        early = {key: tensor.shape for key, tensor in wire.state_dict().items() if isinstance(tensor, Tensor)}
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        losses = train(ddp, optimizer, range(6))
        state = wire.state_dict()
        assert {key: tensor.shape for key, tensor in state.items() if isinstance(tensor, Tensor)} == early
        losses += train(ddp, optimizer, range(6, 30))
        assert sum(losses[-8:]) < sum(losses[:8])
        stats = wire.stats()
        assert stats["chain"] == tree.NAMED[chain]
        assert stats["groups"][0]["traffic_per_step"]["inter"] > 0
        # Dense DDP goes around the engine, but not before what is left has been added.
        wire.change("dense")
        assert wire.executor is not None
        assert wire.executor.rank_states[0].inherits
        train(ddp, optimizer, range(30, 32))
        assert not wire.executor.rank_states[0].inherits
        with pytest.raises(AttachError, match="the ranks disagree"):
            wire.change("topk", "K" if dist.get_rank() else "J")
        wire.change("topk(density=0.05) via C")
        train(ddp, optimizer, range(32, 34))
        assert wire.stats()["chain"] == tree.NAMED["C"]
        return [digest(ddp)]
    finally:
        _forget_nodes()


def test_ddp_with_a_chain() -> None:
    results = run(4, _ddp, "H")
    assert all(result == results[0] for result in results)


def _without_nodes() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(2 + dist.get_rank())
    try:
        with pytest.raises(AttachError, match="needs nodes: the nodes have different numbers of ranks"):
            thinwire.attach(wrapped(mlp(0)), "topk via B")
    finally:
        _forget_nodes()
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        with pytest.raises(AttachError, match="not laid out node by node"):
            thinwire.attach(wrapped(mlp(0)), "topk via B")
    finally:
        _forget_nodes()
    with pytest.raises(AttachError, match="the ranks disagree: chain"):
        thinwire.attach(wrapped(mlp(0)), "topk", chain="K" if dist.get_rank() else "J")
    assert batch(0, 0)


def test_refusals_on_real_ranks() -> None:
    run(2, _without_nodes)


# -- changes -------------------------------------------------------------------------------------------------------------

ROUTE = [
    "topk(density=0.05) via B",
    "topk(density=0.05) via H",
    "int8 via K",
    "topk(density=0.05)",
    "micro(density=0.05)",
    "dense via A",
    "topk(density=0.05) via I",
    "topk(density=0.05) via E",
    "dense",
]


@pytest.mark.parametrize("void", [False, True])
def test_what_was_not_sent_goes_over_to_another_chain(void: bool) -> None:
    exchange = thinwire.Exchange(_empty(), ROUTE[0], thinwire.LocalWorld(4, 2), **OPTIONS)
    for number, text in enumerate(ROUTE):
        assert exchange.executor is not None
        if number:
            before = _left(exchange.executor.rank_states)
            exchange.change(text)
            after = _left(exchange.executor.rank_states)
            for name in SHAPES:
                assert torch.allclose(before[name], after[name], rtol=1e-5, atol=1e-5), f"{text}: {name}"
        rank_states = exchange.executor.rank_states
        if void and number:
            carried = any(group.inherited is not None for group in rank_states[0].groups)
            before = _left(rank_states)
            for rank_state in rank_states:
                rank_state.protect(Safety(tests_results=True))
            _void(exchange, 4)
            if carried:
                assert all(torch.equal(value, before[name]) for name, value in _left(rank_states).items())
                state = exchange.state_dict()
                exchange.load_state_dict(state)
                rank_states = exchange.executor.rank_states
                assert all(torch.equal(value, before[name]) for name, value in _left(rank_states).items())
        for step in range(2):
            given = gradients(SHAPES, 4, "normal", 10 * number + step)
            before = _left(rank_states)
            results = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
            exchange.reduce_(results)
            _check_step(before, given, results, _left(rank_states), text)
        assert all(group.inherited is None for rank_state in rank_states for group in rank_state.groups)


def _change() -> str:
    _nodes(2)
    try:
        exchange = thinwire.Exchange(_empty(), ROUTE[0], **OPTIONS)
        for number, text in enumerate(ROUTE[:6]):
            if number:
                exchange.change(text)
            given = gradients(SHAPES, 4, "normal", number)[dist.get_rank()]
            exchange.reduce_(given)
        return _hash(given)
    finally:
        _forget_nodes()


def test_changes_on_real_ranks() -> None:
    assert len(set(run(4, _change))) == 1
