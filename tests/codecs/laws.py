"""The laws of every codec, as functions of one: `test_laws.py` applies them to all that are registered."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

import thinwire
from thinwire.chains.chain import DEFAULTS
from thinwire.codecs import Codec, GatheredCodec, parse

Tensors = dict[str, Tensor]

ROUNDING = 2.0**-24
WIRE_ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"fp32": 2.0**-149, "fp16": 2.0**-24, "bf16": 2.0**-133}


def gradients(shapes: Mapping[str, tuple[int, ...]], ranks: int, kind: str, seed: int) -> list[Tensors]:
    """One set of gradients for each rank."""
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        if kind == "heavy":
            return values**5
        if kind == "mostly zero":
            return values * (torch.rand(shape, generator=generator) < 0.05)
        if kind == "constant":
            return torch.full(shape, float(torch.rand((), generator=generator)) - 0.5)
        return values

    return [{name: one(shape) for name, shape in shapes.items()} for _ in range(ranks)]


def residuals(exchange: thinwire.Exchange) -> list[Tensors]:
    """Of each rank, by name; copies."""
    assert exchange.executor is not None
    return [
        {name: r.clone() for name, r in rank_state.residuals.named()} for rank_state in exchange.executor.rank_states
    ]


def largest_parts(exchange: thinwire.Exchange) -> Tensors:
    """By name, the sum of the magnitudes of all residuals: where a rank has several, their sum may be much smaller.

    With two Comps one is usually what the first left, and another, of the opposite sign, what the second did.
    """
    assert exchange.executor is not None
    sizes: Tensors = {}
    for rank_state in exchange.executor.rank_states:
        for _, parameter, inside, flat in rank_state.residuals.pieces():
            size = sizes.setdefault(parameter.name, torch.zeros(parameter.elements, dtype=torch.float64))
            size[inside] += flat.double().abs()
    return sizes


@dataclasses.dataclass
class Step:
    """One step of an exchange: what went in, what came out, and the residuals on both sides, for each rank.

    parts  magnitudes of the residuals that those of a rank are the sum of, before and after together
    """

    given: list[Tensors]
    results: list[Tensors]
    before: list[Tensors]
    after: list[Tensors]
    parts: Tensors
    entries: int


def steps_of(exchange: thinwire.Exchange, every: Sequence[list[Tensors]]) -> Iterator[Step]:
    for given in every:
        before, parts = residuals(exchange), largest_parts(exchange)
        results = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in given]
        exchange.reduce_(results)
        assert exchange.executor is not None
        entries = sum(run.way.entries for rank_state in exchange.executor.rank_states for run in rank_state.groups)
        parts = {name: size + parts[name] for name, size in largest_parts(exchange).items()}
        yield Step(given, results, before, residuals(exchange), parts, entries)


def check_replicas(step: Step) -> None:
    """All ranks hold the same bits."""
    for results in step.results[1:]:
        for name, tensor in results.items():
            assert torch.equal(tensor.view(torch.int32), step.results[0][name].view(torch.int32)), name


def check_conservation(codec: Codec, step: Step, *, may_cancel: bool, mixes: bool = False) -> None:
    """sent + residual_after == residual_before + gradient on every rank, and the mean of sent is the result.

    What a rank sent of a tensor is the difference of its residuals. It is exactly zero where nothing was sent. A codec that
    `mixes` elements (products of matrices) rounds relative to the largest of them: what it takes from an element may be too
    little to change it.
    """
    ranks = range(len(step.given))
    summed = "fp32" if isinstance(codec, GatheredCodec) else getattr(codec, "values", "fp32")
    wire, smallest = WIRE_ROUNDING[summed], 8 * SMALLEST[summed]
    for name, result in step.results[0].items():
        coded = name in step.after[0]
        assert all(bool(torch.isfinite(step.after[r][name]).all()) for r in ranks if coded)
        # float32, as every codec accumulates: an element that is not sent holds exactly this.
        totals = [step.before[r][name] + step.given[r][name] if coded else step.given[r][name] for r in ranks]
        left = [step.after[r][name] if coded else torch.zeros_like(result) for r in ranks]
        sent = [total.double() - rest.double() for total, rest in zip(totals, left, strict=True)]
        size = sum((total.double().abs() + s.abs() for total, s in zip(totals, sent, strict=True)), torch.zeros(()))
        if coded:
            size = size + step.parts[name].view(result.shape)
        if mixes and size.numel():
            size = size.max().expand_as(size)
        allowed = size / len(step.given) * (8 * ROUNDING + (4 * wire if coded else 0)) + smallest
        off = (torch.stack(sent).mean(0) - result.double()).abs() if sent else torch.zeros(())
        assert bool((off <= allowed).all()), f"{name}: {float(off.max())} of the mean of what was sent is lost"
        if coded:
            untouched = torch.stack([total == rest for total, rest in zip(totals, left, strict=True)]).all(0)
            most = allowed[untouched] if mixes else 0.0
            assert bool((result[untouched].abs() <= most).all()), f"{name}: a result where no rank sent anything"
            if not may_cancel and exact_when_unsent(codec):
                assert bool(untouched[result == 0].all()), f"{name}: a residual changed where nothing was sent"


def exact_when_unsent(codec: Codec) -> bool:
    """Whether a zero in the result means that no rank sent anything: not where values are rounded to nothing."""
    return getattr(codec, "values", "fp32") == "fp32"


def check_gaps(exchange: thinwire.Exchange) -> None:
    """Between the parameters of a group, where others lie that are not coded, its residual holds nothing."""
    assert exchange.executor is not None
    for rank_state in exchange.executor.rank_states:
        for run, each in zip(rank_state.groups, rank_state.residuals.held, strict=True):
            for held in each:
                outside = torch.ones(run.info.elements, dtype=torch.bool)
                for parameter in run.info.parameters:
                    outside[parameter.offset : parameter.offset + parameter.elements] = False
                assert not bool(held.flat[outside[held.start : held.stop]].any())


def check_mean(step: Step, wire: str) -> None:
    """The result is the mean, to a few roundings of the wire's dtype."""
    for name, result in step.results[0].items():
        stack = torch.stack([given[name].double() for given in step.given])
        allowed = stack.abs().mean(0) * 16 * WIRE_ROUNDING[wire] + 8 * SMALLEST[wire]
        assert bool(((stack.mean(0) - result.double()).abs() <= allowed).all()), name


def check_steps(
    codec: Codec,
    shapes: Mapping[str, tuple[int, ...]],
    ranks: int,
    kinds: Sequence[str],
    seed: int,
    min_elements: int,
    *,
    chain: str | None = None,
    mixes: bool = False,
) -> None:
    """Conservation (or the plain mean, for a codec that keeps nothing) and equal replicas, over several steps."""
    exchange = thinwire.Exchange(
        {name: torch.empty(shape) for name, shape in shapes.items()},
        codec,
        thinwire.LocalWorld(ranks),
        chain=chain,
        min_elements=min_elements,
        group_bytes=8000,
    )
    every = [gradients(shapes, ranks, kind, seed + step) for step, kind in enumerate(kinds)]
    for step in steps_of(exchange, every):
        check_replicas(step)
        if codec.keeps_residual:
            check_gaps(exchange)
            # In a chain of two Comps the second may hold back what the first one sent.
            check_conservation(
                codec, step, may_cancel="constant" in kinds or bool(exchange.strategy.chain), mixes=mixes
            )
        else:
            assert not step.after[0]
            check_mean(step, getattr(codec, "dtype", "fp32"))


def check_nothing(codec: Codec, shapes: Mapping[str, tuple[int, ...]], ranks: int) -> None:
    """Zero gradients on zero residuals send nothing and give zeros."""
    exchange = thinwire.Exchange(
        {name: torch.empty(shape) for name, shape in shapes.items()}, codec, thinwire.LocalWorld(ranks), min_elements=8
    )
    nothing = [{name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(ranks)]
    for number, step in enumerate(steps_of(exchange, [nothing] * 3)):
        assert not any(bool(tensor.any()) for results in step.results for tensor in results.values())
        assert not any(bool(tensor.any()) for after in step.after for tensor in after.values())
        begins_dense = number == 0 and isinstance(codec, thinwire.MiCRO)
        if getattr(codec, "density", None) is not None and not begins_dense:
            assert step.entries == 0, "entries were sent"


def check_density_one(
    codec: Codec, shapes: Mapping[str, tuple[int, ...]], ranks: int, seed: int, *, exact: bool = True
) -> None:
    """At density 1 nothing is held back but the rounding of the wire, so that the result is the dense mean.

    `exact=False` is for codecs that estimate their threshold: density 1 is their target, which they may miss by half.
    """
    everything = dataclasses.replace(codec, density=1.0)  # type: ignore[call-arg]
    exchange = thinwire.Exchange(
        {name: torch.empty(shape) for name, shape in shapes.items()},
        everything,
        thinwire.LocalWorld(ranks),
        min_elements=8,
    )
    wire = getattr(codec, "values", "fp32")
    every = [gradients(shapes, ranks, "normal", seed + step) for step in range(4)]
    for step in steps_of(exchange, every):
        for rank, (before, after) in enumerate(zip(step.before, step.after, strict=True)):
            step.given[rank] |= {name: before[name] + step.given[rank][name] for name in before}
            for name, left in after.items() if exact else ():
                assert bool((left.abs() <= step.given[rank][name].abs() * WIRE_ROUNDING[wire] + SMALLEST[wire]).all())
        if exact:
            check_mean(step, wire)
    results = torch.cat([result.flatten() for result in step.results[0].values()])
    assert not results.numel() or float((results != 0).float().mean()) >= (0.99 if exact else 0.5)


def check_estimate(codec: Codec, ranks: int, *, steps: int = 30) -> None:
    """The bytes that the planner is told are within a factor two of those of a step, once the codec has settled."""
    shapes = {"matrix": (120, 100), "kernel": (20, 30, 3, 3), "bias": (120,)}
    exchange = thinwire.Exchange(
        {name: torch.empty(shape) for name, shape in shapes.items()},
        codec,
        thinwire.LocalWorld(ranks),
        chain=own(codec),
    )
    base = gradients(shapes, ranks, "heavy", 1)
    every = [
        [
            {name: 0.3 * base[rank][name] + new for name, new in fresh.items()}
            for rank, fresh in enumerate(gradients(shapes, ranks, "normal", 2 + step))
        ]
        for step in range(steps)
    ]
    for given in every:
        exchange.reduce_(given)
    assert exchange.executor is not None
    for run in exchange.executor.rank_states[0].groups:
        estimate = run.codec.estimate(run.info, ranks)
        promised = estimate.gathered + estimate.summed
        assert 0.5 * run.way.bytes <= promised <= 2.0 * run.way.bytes, (
            f"{run.codec}: {promised} promised, {run.way.bytes} sent"
        )


def own(codec: Codec) -> str | None:
    """The chain in which a codec uses its own collectives, where it has another by default."""
    return "J" if type(codec) in DEFAULTS else None


def check_text(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert parse(f"  {codec} ") == codec
