"""The tensor part of the wire for GPUs, with all ranks in this process: laws, bad values, and that no host looks at a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from thinwire.codecs import parse
from thinwire.engine.layout import TensorInfo
from thinwire.errors import AttachError
from thinwire.experimental.parts import Parts, check

SHAPES = {
    "kernel": (24, 16, 3, 3),
    "bias": (80,),
    "matrix": (96, 80),
    "table": (50, 40),
    "norm": (7,),
    "vector": (5001,),
}
KEPT = [
    "topk(density=0.05)",
    "topk(density=0.05, values='fp16')",
    "topk(density=0.003, values='bf16')",
    "randomblock(ratio=8)",
]
ALL = ["dense", "cast", "cast(dtype='fp16')", *KEPT]
CPU = torch.device("cpu")


class Ranks:
    """Several ranks in one process, whose collectives are carried out in memory."""

    def __init__(
        self,
        codec: str,
        world: int,
        dtype: torch.dtype = torch.float32,
        *,
        protected: bool = False,
        exclude: Any = ("table",),
    ) -> None:
        infos = [TensorInfo(name, shape, str(dtype).removeprefix("torch."), "dense") for name, shape in SHAPES.items()]
        options: dict[str, Any] = {"exclude": exclude, "min_elements": 100, "world": world, "device": CPU}
        self.parts = [Parts(infos, parse(codec), **options) for _ in range(world)]
        self.world, self.dtype = world, dtype
        for part in self.parts if protected else ():
            for run in part.kept:
                run.protect()

    def step(self, flats: Sequence[Tensor], number: int, scale: Tensor | None = None) -> bool:
        """A whole step; whether it was void, on which all ranks must agree."""
        asked = [part.begin(flat, number, scale, _upload) for part, flat in zip(self.parts, flats, strict=True)]
        for ranks in zip(*asked, strict=True):
            assert len({(part.operation, part.tensor.shape, part.tensor.dtype) for part in ranks}) == 1
            together = torch.cat([part.tensor for part in ranks])
            total = torch.stack([part.tensor for part in ranks]).sum(0, dtype=ranks[0].tensor.dtype)
            for part in ranks:
                if part.output is not None:
                    part.output.copy_(together)
                else:
                    part.tensor.copy_(total)
        flags = [part.end(flat, True) for part, flat in zip(self.parts, flats, strict=True)]
        assert len({bool(flag) for flag in flags}) == 1
        for part, flag in zip(self.parts, flags, strict=True):
            assert flag is not None
            for run in part.kept:
                run.settle(flag)
        return bool(flags[0])

    def left(self, rank: int) -> Tensor:
        """What a rank keeps, in the place of its tensors, float64."""
        part = self.parts[rank]
        flat = torch.zeros(part.elements, dtype=torch.float64)
        for run in part.kept:
            for name, residual in run.named():
                start, size = part.offsets[name]
                flat[start : start + size] = residual.double().reshape(-1)
        return flat

    def gradients(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(self.parts[0].elements, generator=generator).to(self.dtype) for _ in range(self.world)]


def _upload(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _bits(tensors: Sequence[Tensor]) -> set[bytes]:
    return {tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("codec", ALL)
def test_nothing_is_lost_and_replicas_are_equal(codec: str, world: int) -> None:
    ranks = Ranks(codec, world)
    for step in range(6):
        flats = ranks.gradients(step)
        given = [flat.double() for flat in flats]
        before = [ranks.left(rank) for rank in range(world)]
        assert not ranks.step(flats, step)
        after = [ranks.left(rank) for rank in range(world)]
        assert len(_bits(flats)) == 1
        sent = [b + g - a for b, g, a in zip(before, given, after, strict=True)]
        off = (torch.stack(sent).mean(0) - flats[0].double()).abs().max()
        assert off < (0.05 if codec.startswith("cast") else 1e-5), step
        if codec in KEPT:
            waits = after[0] != 0
            assert 0.1 < waits.double().mean() < 0.99
            # Where nothing was sent nothing is rounded twice: the residual is the float32 sum itself.
            idle = (sent[0].abs() < 1e-3) & waits  # two ranks may send what adds up to nothing
            expected = (before[0].float() + given[0].float()).double()
            assert torch.equal(after[0][idle], expected[idle])
            start, size = ranks.parts[0].offsets["table"]
            assert not after[0][start : start + size].any(), "an excluded tensor travels dense"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec", KEPT)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["matrix", "norm", "table"])
def test_a_bad_value_voids_the_step(codec: str, world: int, bad: float, name: str) -> None:
    for protected in (True, False):
        ranks = Ranks(codec, world, protected=protected)
        ranks.step(ranks.gradients(0), 0)
        before = [ranks.left(rank) for rank in range(world)]
        flats = ranks.gradients(1)
        flats[-1][ranks.parts[0].offsets[name][0] + 3] = bad
        given = [flat.clone() for flat in flats]
        assert ranks.step(flats, 1)
        assert all(flat.isnan().all() for flat in flats), "everywhere, on all ranks"
        for rank in range(world):
            after = ranks.left(rank)
            if protected:
                assert len(_bits([after, before[rank]])) == 1, "as before, bit for bit"
                continue
            # What was taken is back, and the finite part of the gradient stays, where there is a residual.
            assert after.isfinite().all()
            holds = torch.zeros(after.numel(), dtype=torch.bool)
            for run in ranks.parts[0].kept:
                for parameter in run.info.parameters:
                    start, size = ranks.parts[0].offsets[parameter.name]
                    holds[start : start + size] = True
            expected = (before[rank] + given[rank].nan_to_num(0.0, 0.0, 0.0).double()) * holds
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-6)
        assert not ranks.step(ranks.gradients(2), 2), "the next step counts"
        assert all(ranks.left(rank).isfinite().all() for rank in range(world))


@pytest.mark.parametrize("codec", KEPT)
def test_the_scale_changes_nothing_that_is_kept(codec: str) -> None:
    plain, scaled = Ranks(codec, 2), Ranks(codec, 2, protected=True)
    for step in range(4):
        scale = torch.tensor(2.0 ** (4 + step))
        flats = plain.gradients(step)
        large = [flat * scale for flat in flats]
        assert not plain.step(flats, step)
        assert not scaled.step(large, step, scale)
        coded = torch.ones(flats[0].numel(), dtype=torch.bool)
        assert torch.equal((large[0] / scale)[coded], flats[0][coded])
        assert torch.equal(scaled.left(1), plain.left(1))


@pytest.mark.parametrize("codec", ["topk(density=1.0)", "randomblock(ratio=1)"])
def test_a_mean_that_does_not_fit_the_bucket(codec: str) -> None:
    """Without a scaler it is cut, and the rest waits; with one the step is void, and residuals are as before."""
    for protected in (False, True):
        ranks = Ranks(codec, 2, torch.float16, protected=protected, exclude=())
        for part in ranks.parts:
            for run in part.kept:
                run.residual.narrow(0, run.info.parameters[0].offset, 9).fill_(100_000.0)
        before = ranks.left(0)
        flats = ranks.gradients(0)
        given = flats[0].double()
        void = ranks.step(flats, 0, torch.tensor(1.0) if protected else None)
        assert void == protected
        if protected:
            assert len(_bits([ranks.left(0), before])) == 1
        else:
            assert (flats[0][:9] == 65504.0).all()
            torch.testing.assert_close(ranks.left(0)[:9], before[:9] + given[:9] - 65504.0, rtol=1e-4, atol=2.0)


@pytest.mark.parametrize("codec", [*KEPT, "dense"])
def test_nobody_reads_a_value_and_no_devices_mix(codec: str) -> None:
    """With tensors that have a device and a shape but no values: the host cannot look at one, and nothing mixes devices."""
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        infos = [TensorInfo(name, shape, "float32", "dense") for name, shape in SHAPES.items()]
        # Made on the processor, where this torch can make index tensors at all; then carried over as what they would be.
        parts = Parts(infos, parse(codec), exclude=("table",), min_elements=100, world=3, device=CPU)
        for owner in [parts, *parts.runs]:
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    setattr(owner, name, torch.empty(value.shape, dtype=value.dtype, device=device))
                if name == "device":
                    owner.device = device
        for run in parts.kept:
            run.protect()
        flat, scale = torch.empty(parts.elements, device=device), torch.ones((), device=device)
        asked = parts.begin(
            flat, 5, scale, lambda numbers: torch.empty(len(numbers), dtype=torch.int64, device=device)
        )
        assert asked
        assert all(
            tensor.device == device for part in asked for tensor in (part.tensor, part.output) if tensor is not None
        )
        bad = parts.end(flat, True)
        assert bad is not None
        assert bad.device == device
        for run in parts.kept:
            run.settle(bad)
            assert run.residual.device == device
        with pytest.raises(DataDependentOutputException):
            bool(bad)  # that is how a look at a value would have ended


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("micro", "micro does not run on CUDA yet; there are: dense, cast, topk, randomblock"),
        ("laplace", "laplace does not run on CUDA"),
        ("topk(momentum=0.9)", "momentum does not run on CUDA"),
    ],
)
def test_what_is_refused(codec: str, words: str) -> None:
    with pytest.raises(AttachError, match=words):
        check(parse(codec))
