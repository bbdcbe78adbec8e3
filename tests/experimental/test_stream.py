"""The wire for GPUs, on tensors of the processor over real gloo ranks: all but its stream is what runs on a GPU."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import thinwire
from tests.engine.test_nonfinite import Bad, Spoiler
from tests.models import batch, digest, mlp, wrapped
from tests.plans import plan_of
from tests.ranks import run
from thinwire.ddp.attach import check_job, device_of, stream_wire
from thinwire.engine.ddp_module import parameters_of
from thinwire.engine.layout import describe, kinds_of
from thinwire.engine.strategy import Strategy
from thinwire.errors import AttachError, ExchangeError, StateError
from thinwire.experimental.stream import StreamWire
from thinwire.lab import selftest_device

KEPT = ["topk(density=0.05)", "topk(density=0.05, values='fp16')", "randomblock(ratio=8)"]
CODECS = ["dense", "cast", *KEPT, "topk(density=Warmup(0.02, steps=4))"]


def streamed(
    ddp: DistributedDataParallel,
    codec: str,
    scaler: torch.amp.GradScaler | None = None,
    *,
    exclude: Sequence[str] = (),
    hooks: bool = True,
) -> StreamWire:
    """What `attach` does for parameters on a GPU."""
    strategy = Strategy.of(codec)
    check_job(ddp, strategy)
    kinds = kinds_of(ddp.module)
    tensors = [describe(name, p, kinds.get(name)) for name, p in parameters_of(ddp).items()]
    return stream_wire(ddp, strategy, tensors, scaler=scaler, exclude=exclude, min_elements=100, hooks=hooks)


def backward(ddp: nn.Module, step: int, scaler: torch.amp.GradScaler | None = None) -> None:
    inputs, targets = batch(step, dist.get_rank())
    for parameter in ddp.parameters():
        parameter.grad = None
    loss = nn.functional.cross_entropy(ddp(inputs), targets)
    (loss if scaler is None else scaler.scale(loss)).backward()


def gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in ddp.module.named_parameters() if p.grad is not None}


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


# -- the same as the ordinary wire -------------------------------------------------------------------------------------


def _beside_the_ordinary_wire(codecs: list[str]) -> list[int]:
    counts = []
    for codec in codecs:
        ordinary, other = wrapped(), wrapped()
        wire = thinwire.attach(ordinary, codec, min_elements=100, exclude=["2.weight"])
        stream = streamed(other, codec, exclude=["2.weight"])
        optimizer = torch.optim.SGD(ordinary.parameters(), lr=0.1)
        for step in range(8):
            backward(ordinary, step)
            backward(other, step)
            expected, found = gradients(ordinary), gradients(other)
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(
                    gradient, expected[name], rtol=1e-5, atol=1e-7, msg=f"{codec}, {step}, {name}"
                )
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(other.parameters(), ordinary.parameters(), strict=True):
                    mine.copy_(theirs)
        rank = dist.get_rank()
        theirs = {key.split(".residual.")[1]: value for key, value in wire.state_dict().items() if ".residual." in key}
        mine = stream.residuals()
        assert mine.keys() == theirs.keys()
        for name, residual in mine.items():
            torch.testing.assert_close(
                residual, theirs[name], rtol=1e-5, atol=1e-6, msg=f"{codec}, rank {rank}, {name}"
            )
        assert (stream.dense_steps, stream.steps) == ((8, 0) if codec == "dense" else (2, 6))
        counts.append(stream.stats()["bytes_per_step"])
        wire.close()
        stream.close()
    return counts


def test_the_same_as_the_ordinary_wire() -> None:
    results = run(2, _beside_the_ordinary_wire, CODECS)
    assert results[0] == results[1]
    sizes = dict(zip(CODECS, results[0], strict=True))
    elements = sum(p.numel() for p in mlp().parameters())
    assert sizes["dense"] == 4 * elements
    assert sizes["randomblock(ratio=8)"] < sizes["cast"] < sizes["dense"]


# -- laws --------------------------------------------------------------------------------------------------------------


def _conserves(codec: str, scale: float | None) -> tuple[list[str], float]:
    ddp = wrapped(gradient_as_bucket_view=scale is None)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    wire = streamed(ddp, codec, scaler)
    spoiler = Spoiler(ddp.module, {})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    digests, worst = [], 0.0
    for step in range(10):
        spoiler.step = step
        before = {name: residual.double() for name, residual in wire.residuals().items()}
        factor = 1.0 if scaler is None else scaler.get_scale()
        backward(ddp, step, scaler)
        after = {name: residual.double() for name, residual in wire.residuals().items()}
        for name, result in gradients(ddp).items():
            nothing = torch.zeros_like(result, dtype=torch.float64)
            sent = before.get(name, nothing) + spoiler.local[name].double() / factor - after.get(name, nothing)
            dist.all_reduce(sent)
            worst = max(worst, float((sent / dist.get_world_size() - result.double() / factor).abs().max()))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        digests.append(digest(ddp))
    assert wire.steps == 8
    assert any(residual.any() for residual in wire.residuals().values())
    return digests, worst


@pytest.mark.parametrize("codec", KEPT)
def test_nothing_is_lost_and_replicas_are_equal(codec: str) -> None:
    for scale in (None, 2.0**10):
        results = run(3, _conserves, codec, scale)
        assert results[0][0] == results[1][0] == results[2][0]
        assert len(set(results[0][0])) == 10, "it trains"
        assert max(worst for _, worst in results) < 1e-6


EVENTS = {
    1: Bad("2.weight", float("nan"), (0,)),
    3: Bad("4.weight", float("inf"), (1,)),  # in the first bucket of a step
    5: Bad("0.weight", float("-inf"), (0,)),  # in the last: what earlier ones did is undone as well
    6: Bad("0.bias", float("nan"), (1,)),  # travels dense
}


def _spoilt(codec: str, scaled: bool) -> list[str]:
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000) if scaled else None
    wire = streamed(ddp, codec, scaler)
    spoiler = Spoiler(ddp.module, EVENTS)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if scaler is None:
        wire.guard(optimizer)
    digests = []
    for step in range(9):
        spoiler.step = step
        parameters, before = digest(ddp), {name: residual.clone() for name, residual in wire.residuals().items()}
        backward(ddp, step, scaler)
        spoilt = [name for name, gradient in gradients(ddp).items() if not gradient.isfinite().all()]
        assert bool(spoilt) == (step in EVENTS)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert wire.skipped_last_step == (step in EVENTS)
        assert (digest(ddp) == parameters) == (step in EVENTS), "training stops for a step, and goes on"
        after = wire.residuals()
        assert all(residual.isfinite().all() for residual in after.values())
        if step in EVENTS and step > 1 and scaled:
            assert bits(after) == bits(before), "as before, bit for bit"
        elif step in EVENTS and step > 1:
            for name, residual in after.items():
                kept = spoiler.local[name].nan_to_num(0.0, 0.0, 0.0)
                torch.testing.assert_close(residual, before[name] + kept, rtol=1e-5, atol=1e-6)
        digests.append(digest(ddp))
    assert wire.stats()["skipped"] == len(EVENTS)
    return digests


@pytest.mark.parametrize("scaled", [True, False])
def test_a_bad_value_on_one_rank(scaled: bool) -> None:
    for codec in KEPT[0], KEPT[2]:
        results = run(2, _spoilt, codec, scaled)
        assert results[0] == results[1]


# -- no look at a value ------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Refuses operations that hand a value, or a size that depends on one, to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen.add(name)
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal"):
            raise AssertionError(f"the host reads a value: {name}")
        return func(*args, **(kwargs or {}))


def _watched(codec: str, scaled: bool) -> set[str]:
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    wire, watch = streamed(ddp, codec, scaler), Watch()
    inside = wire.on_bucket

    def on_bucket(bucket: Any) -> Any:
        with watch:
            return inside(bucket)

    wire.on_bucket = on_bucket  # type: ignore[method-assign]
    for step in range(5):
        backward(ddp, step, scaler)
    assert wire.steps == 3
    with pytest.raises(AssertionError, match="_local_scalar_dense"), watch:
        wire._void.item()
    return watch.seen


def test_the_host_reads_nothing() -> None:
    for codec, scaled in (
        ("topk(density=0.05)", True),
        ("topk(density=0.05)", False),
        ("randomblock", True),
        ("cast", False),
    ):
        for seen in run(2, _watched, codec, scaled):
            assert "index_add_" in seen or "remainder_" in seen or codec == "cast"
            assert codec == "cast" or "masked_fill_" in seen, "otherwise nobody watched"


# -- saved states ------------------------------------------------------------------------------------------------------


def _job(codec: str, model: nn.Module) -> tuple[DistributedDataParallel, StreamWire, torch.optim.Optimizer]:
    ddp = wrapped(model)
    return ddp, streamed(ddp, codec), torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _resumes(codec: str) -> list[str]:
    ddp, wire, optimizer = _job(codec, mlp())
    saved: dict[int, Any] = {}
    for step in range(7):
        if step in (1, 2, 4):
            file = io.BytesIO()
            torch.save([ddp.module.state_dict(), wire.state_dict(), optimizer.state_dict()], file)
            saved[step] = file.getvalue()
        backward(ddp, step)
        optimizer.step()
        if step == 0:
            first = wire._coming
    expected, left = digest(ddp), bits(wire.residuals())
    assert wire._partition != first, "the buckets of the first step are others, otherwise this shows nothing"
    wire.close()
    for begin, content in saved.items():
        model, state, momentum = torch.load(io.BytesIO(content), weights_only=True)
        ddp, wire, optimizer = _job(codec, mlp(seed=1))
        ddp.module.load_state_dict(model)
        optimizer.load_state_dict(momentum)
        wire.load_state_dict(state)
        for step in range(begin, 7):
            backward(ddp, step)
            optimizer.step()
        assert digest(ddp) == expected, f"resumed at {begin}"
        assert bits(wire.residuals()) == left, f"resumed at {begin}"
        wire.close()
    return [expected]


@pytest.mark.parametrize("codec", ["topk(density=0.05)", "randomblock(ratio=8)"])
def test_a_resumed_job_makes_the_same_bits(codec: str) -> None:
    results = run(3, _resumes, codec)
    assert results[0] == results[1] == results[2]


def _refuses_states() -> None:
    ddp, wire, _ = _job("topk(density=0.05)", mlp())
    for step in range(4):
        backward(ddp, step)
    state, me = wire.state_dict(), f"rank{dist.get_rank()}"
    meta, before = json.loads(state[f"{me}.stream"]), bits(wire.residuals())

    def changed(**fields: Any) -> dict[str, Any]:
        return {**state, f"{me}.stream": json.dumps({**meta, **fields})}

    shapes = meta["tensors"]
    other = {key.replace(me, f"rank{1 - dist.get_rank()}"): value for key, value in state.items()}
    ordinary = thinwire.Exchange({"a": torch.zeros(2000)}, "topk", min_elements=100)
    for bad, words in (
        ({}, f"no '{me}.stream' in this state.*it has: none"),
        (other, f"it has: rank{1 - dist.get_rank()}.stream"),
        (ordinary.state_dict(), f"it has: {me}.thinwire"),
        (changed(codec="topk"), r"codec: the state has 'topk', this job has 'topk\(density=0.05\)'"),
        (changed(rank=1 - dist.get_rank()), "rank: "),
        (changed(world=3), "world: the state has 3, this job has 2"),
        (changed(tensors={**shapes, "0.weight": [32, 96]}), r"'0.weight': the state has \[32, 96\], this model has \[96, 32\]"),
        (changed(tensors={**shapes, "9.weight": [2]}), r"'9.weight': the state has \[2\], this model has no such"),
        (changed(dtypes={**meta["dtypes"], "0.weight": "float16"}), "'0.weight': the state has float16, this model"),
        (changed(steps="many"), r"cannot be read: Expected `int`, got `str` - at `\$.steps`"),
        (changed(partition=[]), "every tensor of this model once"),
        ({k: v for k, v in state.items() if not k.endswith("0.weight")}, "residual.0.weight' should be .* is missing"),
        ({**state, f"{me}.residual.2.weight": torch.full((64, 96), float("nan"))}, "2.weight' holds a value that is not"),
    ):  # fmt: skip
        with pytest.raises(StateError, match=words):
            wire.load_state_dict(bad)
        assert bits(wire.residuals()) == before
    wire.load_state_dict(state)
    backward(ddp, 5)


def _files(folder: str) -> None:
    ddp, wire, _ = _job("topk(density=0.05)", mlp())
    for step in range(4):
        backward(ddp, step)
    wire.save(folder)
    saved = bits(wire.residuals())
    backward(ddp, 4)
    assert bits(wire.residuals()) != saved
    dist.barrier()
    wire.load(folder)
    assert bits(wire.residuals()) == saved
    with pytest.raises(
        StateError, match="rank 1 refuses|cannot be read" if dist.get_rank() == 0 else "cannot be read"
    ):
        wire.load(folder if dist.get_rank() == 0 else f"{folder}/none.safetensors")
    assert bits(wire.residuals()) == saved, "nobody loads what one cannot"
    assert wire.steps == 2


def test_files(tmp_path: Path) -> None:
    run(2, _files, str(tmp_path / "wire"))


def test_states_that_do_not_fit() -> None:
    run(2, _refuses_states)


# -- uneven inputs -----------------------------------------------------------------------------------------------------


def _joins() -> tuple[int, str]:
    ddp, wire, optimizer = _job("topk(density=0.05)", mlp())
    with ddp.join():
        for step in range(4 + 3 * dist.get_rank()):
            backward(ddp, step)
            optimizer.step()
    return wire.dense_steps + wire.steps, digest(ddp)


def test_a_rank_that_has_nothing_left() -> None:
    (first, digest_of_first), (second, digest_of_second) = run(2, _joins)
    assert first == second == 7, "a rank that has joined takes part in every step"
    assert digest_of_first == digest_of_second


# -- what does not work ------------------------------------------------------------------------------------------------


def _ends() -> str:
    ddp, wire, _ = _job("topk(density=0.05)", mlp())
    for step in range(3):
        backward(ddp, step)
    with pytest.raises(AttributeError, match="a wire on CUDA has no 'change'; it has: explain, stats"):
        wire.change("dense")  # type: ignore[operator]
    if dist.get_rank() == 1:
        wire.close()
    with pytest.raises(RuntimeError) as found:  # as torch hands on what a future raises
        backward(ddp, 3)
    assert isinstance(wire.error, ExchangeError)
    with pytest.raises(RuntimeError, match="this wire is closed"):
        backward(ddp, 4)
    return str(found.value)


def test_a_wire_that_is_closed_on_one_rank() -> None:
    texts = run(2, _ends)
    assert "step 3, all-" in texts[0], texts[0]
    assert "rank 0" in texts[0]
    assert "it was closed" in texts[1]


def test_where_parameters_may_be() -> None:
    here = {"a": torch.zeros(3), "b": torch.zeros(2)}
    assert device_of(here) == torch.device("cpu")
    with FakeTensorMode():
        there = {"c": torch.zeros(3, device="cuda:1"), "d": torch.zeros(2, device="cuda:1")}
        assert device_of(there) == torch.device("cuda:1")
        with pytest.raises(AttachError, match=r"'a' is on cpu and 'c' on cuda:1"):
            device_of({**here, **there})
        with pytest.raises(AttachError, match=r"'c' is on cuda:1 and 'e' on cuda:0"):
            device_of({**there, "e": torch.zeros(3, device="cuda:0")})
    with pytest.raises(AttachError, match=r"'m' is on meta: there are exchanges for tensors of CPUs and CUDA"):
        device_of({"m": torch.zeros(3, device="meta")})


def _refuses_jobs() -> None:
    ddp = wrapped()
    shapes = {name: tuple(p.shape) for name, p in parameters_of(ddp).items()}
    for strategy, words in (
        (Strategy.of("micro"), "micro does not run on CUDA yet; there are: dense, cast, topk, randomblock"),
        (Strategy.of("topk", "B"), "chains do not run on CUDA yet"),
        (Strategy.of("topk(momentum=0.5)"), "momentum does not run on CUDA"),
        (Strategy.of(plan_of(shapes, [([*shapes], "topk")], 2)), "plans do not run on CUDA yet; name a codec"),
    ):
        with pytest.raises(AttachError, match=words):
            check_job(ddp, strategy)
    searching = wrapped(find_unused_parameters=True)
    check_job(searching, Strategy.of("cast"))
    with pytest.raises(AttachError, match="find_unused_parameters=True does not run on CUDA"):
        check_job(searching, Strategy.of("topk"))


def test_what_is_refused() -> None:
    run(2, _refuses_jobs)


def _left_alone() -> tuple[str, str, str]:
    ours, plain = wrapped(), wrapped()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logger = logging.getLogger("thinwire")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # thinwire leaves it alone where the program logs by itself
    wire = streamed(ours, "dense", hooks=False)  # as `attach(ddp)` does it
    logger.removeHandler(handler)
    for ddp in (ours, plain):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            backward(ddp, step)
            optimizer.step()
    assert not ours._comm_hooks
    assert wire.stats()["steps"] == 0
    return said.getvalue(), digest(ours), digest(plain)


def test_auto_leaves_ddp_alone_and_says_so() -> None:
    (text, ours, plain), (other, *_) = run(2, _left_alone)
    assert ours == plain
    assert "DDP goes on alone, without a hook" in text
    assert other == "", "only rank 0 speaks"


def test_the_check_of_the_selftest() -> None:
    """On the processor it does what it does on a GPU."""
    for text in run(2, _selftest):
        assert text == "cpu over gloo, experimental: trains, loses nothing, rolls back, resumes"


def _selftest() -> str:
    return selftest_device.run(torch.device("cpu"), "gloo")
