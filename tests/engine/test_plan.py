"""Plans in execution: several codecs and chains in one wire keep the laws of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.codecs.laws import Tensors, gradients
from tests.models import batch, digest, mlp, train, wrapped
from tests.plans import plan_of
from tests.ranks import run
from thinwire.ddp.wrap import bucket_caps, falling_caps, wrap
from thinwire.errors import AttachError, PlanError, StateError
from thinwire.planner.plan import Plan

SHAPES = {"a": (30, 41), "b": (7,), "c": (50, 53), "d": (6, 5, 3, 3), "e": (9,), "f": (40, 30)}
MIXED = [
    (("f", "e"), "micro(density=0.05)"),  # e rides
    (("c",), "dense"),
    (("d", "b"), "topk(density=0.1)"),  # b travels elsewhere
    (("a",), "int8(block=100)"),
]
OTHER = [(("a", "b", "c"), "adacomp(bin_conv=10, bin_dense=30)"), (("f",), "lowrank(rank=2)"), (("e", "d"), "cast")]
NODES = [
    (("a", "b"), "topk(density=0.05) via H"),
    (("c", "d"), "micro(density=0.05) via iRS comp eARc dec iAG"),
    (("e",), "dense via iRS eAR iAG"),
    (("f",), "randomblock(ratio=4.0)"),
]


def _empty() -> Tensors:
    return {name: torch.empty(shape) for name, shape in SHAPES.items()}


def _exchange(groups: list[Any], ranks: int = 2, each: int = 1, **options: Any) -> thinwire.Exchange:
    plan, world = plan_of(SHAPES, groups, ranks, each), thinwire.LocalWorld(ranks, each)
    return thinwire.Exchange(_empty(), plan, world, min_elements=50, **options)


def _left(exchange: thinwire.Exchange) -> Tensors:
    """What all ranks together have not sent yet, carried parts included."""
    assert exchange.executor is not None
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank_state in exchange.executor.rank_states:
        for name, residual in rank_state.residuals.named():
            total[name] += residual.double()
        for group in rank_state.groups:
            for p in group.info.parameters if group.inherited is not None else ():
                total[p.name] += group.inherited[p.offset : p.offset + p.elements].view(p.shape).double()
    return total


def _check_steps(exchange: thinwire.Exchange, steps: range) -> None:
    for step in steps:
        given = gradients(SHAPES, exchange.world.size, "normal", step)
        before = _left(exchange)
        results = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
        exchange.reduce_(results)
        after = _left(exchange)
        for name, result in results[0].items():
            assert all(torch.equal(result, other[name]) for other in results[1:]), name
            came = before[name] + torch.stack([tensors[name].double() for tensors in given]).sum(0)
            went = after[name] + len(given) * result.double()
            # cast and low rank round what they send, relative to the whole tensor
            assert float((came - went).abs().max()) < 0.02 * float(came.abs().max()), (name, step)


@pytest.mark.parametrize(("groups", "ranks", "each"), [(MIXED, 3, 1), (OTHER, 2, 1), (NODES, 4, 2)])
def test_nothing_is_lost_and_replicas_are_equal(groups: list[Any], ranks: int, each: int) -> None:
    exchange = _exchange(groups, ranks, each)
    _check_steps(exchange, range(6))
    stats = exchange.stats()
    assert stats["codec"].startswith("plan: ")
    used = {group["codec"] for group in stats["groups"]}
    assert used >= {text.partition(" via ")[0] for _, text in groups}


def test_groups_follow_the_plan() -> None:
    exchange = _exchange(MIXED)
    assert exchange.executor is not None
    cut = {}
    for group in exchange.executor.layout.groups:
        for slot in group.slots:
            cut.setdefault(slot.name, []).append((group.codec, slot.role))
    assert cut["e"] == [("micro(density=0.05)", "ride")]
    assert cut["c"] == [("dense", "coded")]
    assert cut["b"] == [("topk(density=0.1)", "elsewhere"), ("dense", "coded")]
    assert cut["a"] == [("int8(block=100)", "coded")]
    # Sent in the order in which the last tensor of each comes: a, then c, d (with b), f (with e).
    order = [group.codec for group in exchange.executor.layout.groups]
    assert order == ["int8(block=100)", "dense", "topk(density=0.1)", "micro(density=0.05)", "dense"]


def test_a_void_step_is_void_in_every_codec() -> None:
    exchange = _exchange(MIXED, 2)
    assert exchange.executor is not None
    for step in range(3):
        exchange.reduce_(gradients(SHAPES, 2, "normal", step))
    before = _left(exchange)
    given = gradients(SHAPES, 2, "normal", 9)
    given[1]["c"][3, 3] = float("nan")  # in the dense group, in the middle of the others
    came = {name: sum(t[name].double() for t in given) for name in SHAPES}
    exchange.reduce_(given)
    assert exchange.skipped_last_step
    after = _left(exchange)
    for name in ("a", "d", "f"):
        assert torch.allclose(after[name], before[name] + came[name], atol=1e-4), name
    _check_steps(exchange, range(10, 13))


def test_changing_plans_loses_nothing() -> None:
    exchange = _exchange(MIXED, 2)
    _check_steps(exchange, range(3))
    for method in (plan_of(SHAPES, OTHER, 2), "topk(density=0.02)", plan_of(SHAPES, MIXED[::-1], 2), "dense"):
        before = _left(exchange)
        exchange.change(method)
        after = _left(exchange)
        assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in SHAPES)
        _check_steps(exchange, range(3, 6))
    assert exchange.plan is None
    with pytest.raises(PlanError, match="the job has 2 ranks, the plan is for 3"):
        exchange.change(plan_of(SHAPES, OTHER, 3))


def test_numbers_of_the_codecs_that_have_them() -> None:
    exchange = _exchange(MIXED, 2)
    exchange.set(density=0.5)
    exchange.reduce_(gradients(SHAPES, 2, "normal", 0))
    assert "topk(density=0.5)" in exchange.stats()["codec"]
    with pytest.raises(AttachError, match="cannot change 'rank'"):
        exchange.set(rank=3)


# -- saved states ----------------------------------------------------------------------------------------------------------


def test_states_of_another_plan_are_converted_and_nothing_is_lost() -> None:
    exchange = _exchange(MIXED, 2)
    _check_steps(exchange, range(3))
    state, before = exchange.state_dict(), _left(exchange)
    same = _exchange(MIXED, 2)
    same.load_state_dict(state)
    for one, other in zip(exchange.executor.rank_states, same.executor.rank_states, strict=True):
        assert all(torch.equal(value, other.unsent()[name]) for name, value in one.unsent().items())
    _check_steps(same, range(3, 5))
    dense = [(names, "dense" if "d" in names else text) for names, text in MIXED]
    single = thinwire.Exchange(_empty(), "topk(density=0.1)", thinwire.LocalWorld(2), min_elements=50)
    for wire in (_exchange(dense, 2), _exchange(OTHER, 2), single):
        wire.load_state_dict(state)
        after = _left(wire)
        assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in SHAPES)
        _check_steps(wire, range(3, 5))
    exchange.load_state_dict(single.state_dict())
    _check_steps(exchange, range(5, 7))


def test_layouts_that_no_plan_gives_are_refused() -> None:
    exchange = _exchange(MIXED, 2)
    state = exchange.state_dict()

    def changed(**groups: dict[str, Any]) -> dict[str, Any]:
        spoilt = dict(state)
        for rank in range(2):
            meta = msgspec.json.decode(state[f"rank{rank}.thinwire"])
            for place, fields in groups.items():
                meta["layout"]["groups"][int(place[1:])] |= fields
            spoilt[f"rank{rank}.thinwire"] = msgspec.json.encode(meta).decode()
        return spoilt

    first = msgspec.json.decode(state["rank0.thinwire"])["layout"]["groups"]
    with pytest.raises(StateError, match=r"'group 2' has codec int8\(block=100\)"):
        exchange.load_state_dict(changed(_2={"codec": "int8(block=100)"}))
    elements = first[0]["elements"]
    moved = [slot | {"offset": slot["offset"] + elements} for slot in first[2]["slots"]]
    mixed = changed(_0={"slots": first[0]["slots"] + moved, "elements": elements + first[2]["elements"]})
    with pytest.raises(StateError, match="different codecs"):
        exchange.load_state_dict(mixed)
    exchange.load_state_dict(changed())


def _resume(groups: list[Any], folder: str, saved: list[int]) -> str:
    """As one codec does, see test_state: going on from a saved point has the bits of not stopping."""
    rank, history = dist.get_rank(), []

    def job(seed: int) -> Any:
        ddp = wrapped(mlp(seed))
        plan = _plan(ddp.module, groups)
        return (
            ddp,
            torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9),
            thinwire.attach(ddp, plan, min_elements=100),
        )

    ddp, optimizer, wire = job(0)
    for step in range(9):
        if step in saved:
            parts = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
            torch.save(parts, Path(folder) / f"{step}.{rank}.pt")
        train(ddp, optimizer, range(step, step + 1))
        history.append(digest(ddp))
    for begin in saved:
        ddp, optimizer, wire = job(1)
        parts = torch.load(Path(folder) / f"{begin}.{rank}.pt", weights_only=True)
        ddp.module.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
        wire.load_state_dict(parts["wire"])
        for step in range(begin, 9):
            train(ddp, optimizer, range(step, step + 1))
            assert digest(ddp) == history[step], f"resumed at {begin}, step {step}"
    return history[-1]


def _plan(model: nn.Module, groups: list[Any]) -> Plan:
    """For the ranks of this test, which all are on one node."""
    return plan_of(_shapes(model), groups, dist.get_world_size(), dist.get_world_size())


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# Groups that are part of a bucket, and others that are made of several.
LAYERS = [
    (("4.weight", "4.bias"), "micro(density=0.05)"),
    (("2.bias", "0.weight"), "topk(density=0.1)"),
    (("2.weight",), "dense"),
    (("0.bias",), "cast"),
]


def test_resume_has_the_bits_of_going_on(tmp_path: Path) -> None:
    results = run(2, _resume, LAYERS, str(tmp_path), [2, 5])
    assert results[0] == results[1]


# -- DDP -------------------------------------------------------------------------------------------------------------------


def _dense_plan() -> tuple[str, str, int]:
    """A plan that compresses nothing takes the direct way, with the bits of DDP."""
    ends = []
    for plan in (True, False):
        ddp = wrapped(mlp(0))
        groups = [(tuple(_shapes(ddp.module)), "dense")]
        wire = thinwire.attach(ddp, _plan(ddp.module, groups)) if plan else None
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(5))
        ends.append(digest(ddp))
        if wire is not None:
            assert wire.strategy.direct
            dense = wire.dense_steps
    return ends[0], ends[1], dense


def test_a_dense_plan_gives_the_bits_of_ddp() -> None:
    for mine, native, dense in run(2, _dense_plan):
        assert mine == native
        assert dense == 5


ORDER = ["4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]  # as backward comes to them
WRAPPED = [
    (("4.weight", "4.bias"), "dense"),
    (("2.weight", "2.bias"), "topk(density=0.1)"),
    (("0.weight", "0.bias"), "micro(density=0.05)"),
]


def _wrap(groups: list[Any], view: bool) -> tuple[list[list[str]], list[str], str, float]:
    model = mlp(0)
    plan = _plan(model, groups)
    ddp, wire = wrap(model, plan, min_elements=100, gradient_as_bucket_view=view)
    losses = train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.5), range(40))
    assert wire.executor is not None
    seen = [list(names) for names in wire.session.seen]
    return seen, [g.codec for g in wire.executor.layout.groups], digest(ddp), losses[-1] / losses[0]


@pytest.mark.parametrize("view", [True, False])
def test_wrap_gives_buckets_that_are_the_groups(view: bool) -> None:
    results = run(2, _wrap, WRAPPED, view)
    for buckets, codecs, model, gain in results:
        assert [set(bucket) for bucket in buckets] == [set(names) for names, _ in WRAPPED]
        assert codecs == ["dense", "topk(density=0.1)", "micro(density=0.05)", "dense"]
        assert model == results[0][2]
        assert gain < 0.9


def test_caps_of_buckets() -> None:
    plan = plan_of({"a": (1 << 18,), "b": (1 << 19,)}, [(("a",), "dense"), (("b",), "dense")], 2)
    assert [round(cap, 3) for cap in bucket_caps(plan)] == [1.0, 2.0]
    narrow = msgspec.structs.replace(plan.tensors[1], dtype="float16")
    mixed = msgspec.structs.replace(plan, tensors=(plan.tensors[0], narrow))
    assert bucket_caps(mixed) == []


class Wide(torch.nn.Sequential):
    """Eight layers of 1 MB."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))


def test_sizes_of_buckets_for_one_codec() -> None:
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(42)]
    assert [round(cap, 3) for cap in falling_caps(torch.nn.Sequential(*layers))] == [29.4, 12.6]
    assert [round(cap, 3) for cap in falling_caps(Wide())] == [5.6, 2.4]
    assert falling_caps(torch.nn.Linear(512, 512, bias=False)) == [1.0]
    with torch.device("meta"):
        large = torch.nn.Linear(1 << 14, 1 << 14, bias=False)
    assert falling_caps(large) == [*[128.0] * 7, 96.0, 32.0]
    assert falling_caps(torch.nn.Sequential(layers[0], torch.nn.Linear(2, 2).double())) == []


def _wrap_one_codec(codec: str, options: dict[str, Any]) -> tuple[list[int], str]:
    model = Wide()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(512, 512, generator=torch.Generator().manual_seed(place)) / 512**0.5)
    ddp, _wire = wrap(model, codec, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
    sizes = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])  # type: ignore[operator]
    return [int(size) >> 20 for size in sizes.split(",")], digest(ddp)


@pytest.mark.parametrize(
    ("codec", "options", "layers"),
    [
        ("micro(density=0.1)", {}, [6, 2]),
        ("micro(density=0.1)", {"bucket_cap_mb": 4}, [4, 4]),
        ("dense", {}, [1, 7]),
        ("auto", {"plan_file": ""}, [6, 2]),
        ("auto", {"plan_file": "", "quality": "lossless"}, [1, 7]),
    ],
)
def test_wrap_gives_few_buckets_to_a_codec(codec: str, options: dict[str, Any], layers: list[int]) -> None:
    results = run(2, _wrap_one_codec, codec, options)
    assert [buckets for buckets, _ in results] == [layers, layers]
    assert results[0][1] == results[1][1]


def _refused_by_wrap() -> str:
    with pytest.raises(thinwire.ThinwireError) as info:
        wrap(Wide(), "micor" if dist.get_rank() else "micro")
    return str(info.value)


def test_a_wrong_codec_on_one_rank_is_refused_on_all() -> None:
    assert all("micor" in text for text in run(2, _refused_by_wrap))


def _refusals() -> list[str]:
    """Every plan that does not fit is refused on every rank, and the module stays as it was."""
    ddp = wrapped(mlp(0))
    shapes, ranks = _shapes(ddp.module), dist.get_world_size()
    everything = [(tuple(shapes), "topk(density=0.1)")]
    wider = shapes | {"2.weight": (64, 97)}
    fewer = {name: shape for name, shape in shapes.items() if name != "0.bias"}
    found = []
    for plan, options in (
        (plan_of(wider, everything, ranks, ranks), {}),
        (plan_of(fewer, [(tuple(fewer), "dense")], ranks, ranks), {}),
        (plan_of(shapes | {"9.bias": (3,)}, [((*shapes, "9.bias"), "dense")], ranks, ranks), {}),
        (plan_of(shapes, everything, ranks + 1, ranks + 1), {}),
        (plan_of(shapes, everything, ranks, ranks, "float16"), {}),
        (plan_of(shapes, everything, ranks), {}),
        (plan_of(shapes, everything, ranks, ranks), {"chain": "B"}),
        (plan_of(shapes, [(tuple(shapes), "dense via comp fAGc dec")], ranks, ranks), {}),
    ):
        with pytest.raises(AttachError) as caught:
            thinwire.attach(ddp, plan, **options)
        found.append(str(caught.value))
    # Ranks with different plans.
    cut = [(tuple(shapes)[: 2 + dist.get_rank()], "dense"), (tuple(shapes)[2 + dist.get_rank() :], "dense")]
    with pytest.raises(AttachError) as caught:
        thinwire.attach(ddp, plan_of(shapes, cut, ranks, ranks))
    found.append(str(caught.value))
    thinwire.attach(ddp, plan_of(shapes, everything, ranks, ranks), min_elements=100)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(4))
    return found


def test_plans_that_do_not_fit() -> None:
    found, other = run(2, _refusals)
    expected = [
        "'2.weight' has shape (64, 96), in the plan (64, 97)",
        "the model has a tensor '0.bias', the plan of 'by hand' has none",
        "the plan of 'by hand' has a tensor '9.bias', the model has none",
        "the job has 2 ranks, the plan is for 3",
        "'0.weight' is float32, in the plan float16",
        "a node has 2 ranks, in the plan 1",
        "leave chain='B' out",
        "compresses, which dense does not",
        "the ranks disagree: plan",
    ]
    for texts in (found, other):
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text


def _late(steps: int) -> tuple[int, str, Tensor]:
    """Attached after training has begun without a hook, as `auto` does it."""
    ddp = wrapped(mlp(0))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, range(steps))
    wire = thinwire.attach(ddp, _plan(ddp.module, LAYERS), min_elements=100)
    train(ddp, optimizer, range(steps, steps + 4))
    wire.change("topk(density=0.05)")
    assert wire.executor is not None
    assert len(wire.executor.layout.groups) == len(wire.session.seen) + 1  # buckets again, not groups of the plan
    train(ddp, optimizer, range(steps + 4, steps + 8))
    return wire.dense_steps, digest(ddp), batch(0, 0)[0]


def test_a_plan_that_comes_late_and_goes() -> None:
    first, second = run(2, _late, 4)
    assert first[0] == 1
    assert first[1] == second[1]
