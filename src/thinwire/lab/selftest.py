"""The checks of `thinwire selftest`, on real ranks and the user's backend: laws, order, errors, roll-back, resume.

All ranks run every check. A check returns a short text, or raises `Failed` or any other exception; the ranks then exchange
their results, so that a failure on one is known to all.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..codecs import CODECS, CodecState, GatheredCodec, Message, TopK, register
from ..comm import object_collectives
from ..ddp.attach import attach
from ..engine.exchange import Exchange
from ..errors import AttachError, ExchangeError, ThinwireError
from ..log import logger, set_up
from . import selftest_device
from .selftest_device import Failed, batch, differing, model

PATIENCE = timedelta(seconds=30)
SHAPES = {"kernel": (24, 16, 3, 3), "matrix": (96, 80), "bias": (80,), "vector": (5000,)}
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a check: a summary, or the failures by rank."""

    name: str
    good: bool
    text: str
    seconds: float


def run(tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run all checks, calling `tell` after each. All ranks must call this."""
    set_up()
    logger.setLevel(logging.WARNING)  # hides the decisions that `attach` logs
    outcomes = []
    for name, check in _checks():
        begun = time.monotonic()
        try:
            mine: dict[str, Any] = {"good": True, "text": check()}
        except Exception as error:
            text = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
            mine = {"good": False, "text": text[:2000]}
        everyone = object_collectives.gather(mine, None)
        bad = [f"rank {rank}: {theirs['text']}" for rank, theirs in enumerate(everyone) if not theirs["good"]]
        outcomes.append(Outcome(name, not bad, "; ".join(bad) or mine["text"], time.monotonic() - begun))
        tell(outcomes[-1])
    return outcomes


def _checks() -> list[tuple[str, Callable[[], str]]]:
    laws = [(f"laws of {name}", lambda name=name: laws_of(name)) for name in CODECS]
    return [
        *laws,
        ("laws of a chain", lambda: laws_of("topk(density=0.05) via K")),
        ("training with DDP", training),
        ("order", order),
        ("roll-back", roll_back),
        ("resume", resume),
        ("refusals", refusals),
        ("errors", errors),
        ("device", device),
    ]


# -- laws --------------------------------------------------------------------------------------------------------------


def laws_of(text: str) -> str:
    """Sent + residual equals input, and results are identical on all ranks."""
    exchange = Exchange(_tensors(0), text, timeout=PATIENCE)
    worst = 0.0
    try:
        for step in range(STEPS):
            given, before = _tensors(step), _left(exchange)
            results = {name: tensor.clone() for name, tensor in given.items()}
            exchange.reduce_(results)
            after = _left(exchange)
            _same(results, f"step {step}")
            for name, result in results.items():
                nothing = torch.zeros(result.shape, dtype=torch.float64)
                sent = before.get(name, nothing) + given[name].double() - after.get(name, nothing)
                sums = torch.stack([sent, before.get(name, nothing).abs() + given[name].double().abs()])
                dist.all_reduce(sums)
                off = (sums[0] / dist.get_world_size() - result.double()).abs().max()
                worst = max(worst, float(off / (sums[1].max() / dist.get_world_size())))
        density = exchange.stats()["groups"]
    finally:
        exchange.close()
    # Casts have no residual, so their rounding error is lost by design. Sums of 16-bit values round too.
    codec = exchange.strategy.assignments[0].codec
    narrow = getattr(codec, "values", "fp32") != "fp32" and not isinstance(codec, GatheredCodec)
    allowed = 0.01 if narrow or text.startswith("cast") else 1e-5
    if worst > allowed:
        raise Failed(f"{worst:.2g} of the input is neither sent nor in the residual")
    return f"{STEPS} steps, {len(density)} groups, largest loss {worst:.1g}"


def _left(exchange: Exchange) -> dict[str, Tensor]:
    return {name: residual.double() for name, residual in exchange.executor.rank_states[0].residuals.named()}


def _tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _same(tensors: dict[str, Tensor], where: str) -> None:
    """Raise `Failed` unless the tensors are identical on all ranks."""
    if count := differing(torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])):
        raise Failed(f"{where}: {count} elements differ between ranks")


# -- jobs --------------------------------------------------------------------------------------------------------------


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def training() -> str:
    """A model learns and stays identical on all ranks."""
    said = []
    for codec in ("topk(density=0.05)", "micro(density=0.05)"):
        ddp = DistributedDataParallel(model(), bucket_cap_mb=0.02)
        wire = attach(ddp, codec, min_elements=100, timeout=PATIENCE)
        losses = _train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), range(60))
        _same(dict(ddp.named_parameters()), codec)
        first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
        if not last < 0.8 * first:
            raise Failed(f"{codec}: the loss went from {first:.3f} to {last:.3f}")
        said.append(f"{codec}: loss {first:.2f} to {last:.2f}")
        wire.close()
    return "; ".join(said)


def order() -> str:
    """Two models in one backward pass, completed in a different order on every rank."""
    groups = [dist.new_group(), dist.new_group()]
    modules = [
        DistributedDataParallel(model(seed), bucket_cap_mb=0.02, process_group=group)
        for seed, group in enumerate(groups)
    ]
    wires = [attach(ddp, "micro(density=0.05)", min_elements=100, timeout=PATIENCE) for ddp in modules]
    optimizer = torch.optim.SGD([p for ddp in modules for p in ddp.parameters()], lr=0.1)
    for step in range(15):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        turned = step >= 3 and (step + dist.get_rank()) % 2 == 1
        losses = [nn.functional.cross_entropy(ddp(inputs), targets) for ddp in modules[:: -1 if turned else 1]]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for number, ddp in enumerate(modules):
        _same(dict(ddp.named_parameters()), f"model {number}")
    for wire in wires:
        wire.close()
    return "two models in one backward, in different order on different ranks"


def roll_back() -> str:
    """A gradient that is not finite on one rank voids the step on all; residuals are as before."""
    exchange = Exchange(_tensors(0), "topk(density=0.05)", protected=True, timeout=PATIENCE)
    exchange.reduce_(_tensors(0))
    before = _left(exchange)
    for step, bad in enumerate((float("nan"), float("inf")), 1):
        spoilt = _tensors(step)
        if dist.get_rank() == dist.get_world_size() - 1:
            spoilt["matrix"][3, 7] = bad
        exchange.reduce_(spoilt)
        if not exchange.skipped_last_step:
            raise Failed(f"{bad} on one rank did not void the step here")
        if any(not torch.equal(before[name], left) for name, left in _left(exchange).items()):
            raise Failed(f"{bad} on one rank changed a residual here")
    exchange.reduce_(_tensors(3))
    if exchange.skipped_last_step:
        raise Failed("the step after it is void too")
    exchange.close()
    return "NaN and Inf on one rank: two steps void on all ranks, residuals unchanged, training continues"


def resume() -> str:
    """A job resumed from a saved state gives the same results as one that was not interrupted, bit for bit."""
    codecs = ("topk(density=0.05)", "micro(density=0.05)", "adacomp")
    for codec in codecs:
        exchange = Exchange(_tensors(0), codec, timeout=PATIENCE)
        for step in range(3):
            exchange.reduce_(_tensors(step))
        saved = exchange.state_dict()
        expected = _tensors(3)
        exchange.reduce_(expected)
        exchange.close()
        resumed = Exchange(_tensors(0), codec, timeout=PATIENCE)
        resumed.load_state_dict(saved)
        found = _tensors(3)
        resumed.reduce_(found)
        resumed.close()
        if any(not torch.equal(found[name], tensor) for name, tensor in expected.items()):
            raise Failed(f"{codec}: the result differs from that without interruption")
    return f"the same bits: {', '.join(codecs)}"


# -- what must not work ------------------------------------------------------------------------------------------------


def refusals() -> str:
    """Ranks with different arguments all get an error before anything is sent."""
    density = 0.5 if dist.get_rank() else 0.25
    try:
        Exchange(_tensors(0), TopK(density), timeout=PATIENCE)
    except AttachError as error:
        if "disagree" not in str(error):
            raise Failed(f"ranks with different codecs: {error}") from error
    else:
        if dist.get_world_size() > 1:
            raise Failed("ranks with different codecs were not refused")
    return "ranks with different codecs are refused"


@dataclasses.dataclass(frozen=True)
class Faulty(TopK):
    """A codec that fails on the last rank."""

    step: int = 2

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        if (state.rank, state.step) == (dist.get_world_size() - 1, self.step) and state.group.elements > 5008:
            raise ZeroDivisionError("on purpose")
        return super().encode(gradient, residual, state)


def errors() -> str:
    """A failure on one rank raises an error on all ranks that says where; nothing hangs, and the wire stays closed."""
    register("faulty_on_purpose", Faulty)
    exchange = Exchange(_tensors(0), Faulty(0.05), timeout=PATIENCE)
    del CODECS["faulty_on_purpose"]
    try:
        for step in range(4):
            exchange.reduce_(_tensors(step))
    except ExchangeError as error:
        last = dist.get_rank() == dist.get_world_size() - 1
        wanted = ["group 0", "step 2", "on purpose" if last else "all-gather"]
        if missing := [word for word in wanted if word not in str(error)]:
            raise Failed(f"the error does not say {missing[0]!r}: {error}") from error
    else:
        raise Failed("a codec that fails on the last rank went unnoticed")
    try:
        exchange.reduce_(_tensors(0))
    except ThinwireError:
        return "a defect on one rank is reported on all, with group, step and collective"
    raise Failed("a closed wire went on")


def device() -> str:
    """The experimental wire on GPUs, if every rank has a GPU or can share one."""
    facts = object_collectives.gather({"devices": torch.cuda.device_count() if torch.cuda.is_available() else 0}, None)
    if any(not fact["devices"] for fact in facts):
        without = [rank for rank, fact in enumerate(facts) if not fact["devices"]]
        return "CPU only: no CUDA device here" if len(without) == len(facts) else f"no CUDA device on ranks {without}"
    return selftest_device.run()
