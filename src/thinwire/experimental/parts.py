"""What becomes of tensors that travel together, on whatever device: plain torch operations, and never a look at a value.

Nothing here knows of processes or streams, and nothing is read back to the host: sizes follow from shapes and from the number
of the step, and what depends on values (is all of it finite?) stays a tensor of one element.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs import Cast, Codec, Dense, RandomBlock, TopK
from ..codecs.randomblock import draw
from ..comm.collectives import Collective
from ..engine.layout import SMALL_GROUP, Exclude, Group, TensorInfo, build
from ..errors import AttachError, ExchangeError

NAN = float("nan")
NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Upload = Callable[[Sequence[int]], Tensor]
"""Whole numbers of the host as int64 on the device, without waiting for it."""


class Run(abc.ABC):
    """Tensors that are compressed together, side by side: elements [start, start + elements) of what travels."""

    rides = False
    """Whether small tensors can travel in its collective."""

    def __init__(self, group: Group, start: int, codec: Codec, world: int, device: torch.device) -> None:
        self.info, self.start, self.world, self.device = group.info(), start, world, device

    @abc.abstractmethod
    def begin(
        self, gradient: Tensor, step: int, scale: Tensor | None, upload: Upload, riders: Tensor | None
    ) -> Collective:
        """What should travel of `gradient`, flat in its own dtype. `scale` divides it while it is accumulated."""

    @abc.abstractmethod
    def end(self, gradient: Tensor, riders: Tensor | None) -> Tensor | None:
        """Write the mean into `gradient`; whether a rank saw something that is not finite, a bool of no dimension."""


class CastRun(Run):
    """Rounded to 16 bits, summed, widened. Memory passes: two, half as wide on one side."""

    def __init__(self, group: Group, start: int, codec: Cast, world: int, device: torch.device) -> None:
        super().__init__(group, start, codec, world, device)
        self._dtype = NARROW[codec.dtype]
        self._narrow: Tensor | None = None

    def begin(
        self, gradient: Tensor, step: int, scale: Tensor | None, upload: Upload, riders: Tensor | None
    ) -> Collective:
        self._narrow = torch.mul(gradient, 1.0 / self.world).to(self._dtype)
        return Collective("sum", self._narrow)

    def end(self, gradient: Tensor, riders: Tensor | None) -> None:
        assert self._narrow is not None
        gradient.copy_(self._narrow)
        self._narrow = None


class KeptRun(Run):
    """A run with a residual, float32 and unscaled.

    Protected, it has two: `residual` as it was before the step, `fresh` as it will be after it. `settle` decides between them,
    once it is known whether the step counts. Otherwise both are one, and a step that does not count puts back what it took.

    Memory passes of `accumulate`: about three of `residual.add_(gradient)`; of `settle`: one if protected.
    """

    def __init__(self, group: Group, start: int, codec: Codec, world: int, device: torch.device) -> None:
        super().__init__(group, start, codec, world, device)
        self.residual = self.fresh = torch.zeros(self.info.elements, device=device)
        self.protected = False
        self._scale: Tensor | None = None
        self._indices = self._sent = self._excess = self._collective = None

    _indices: Tensor | None
    _sent: Tensor | None
    """What this step took out of the residual, and where."""
    _excess: Tensor | None
    """What of this step's mean does not fit the dtype of the bucket."""
    _collective: Collective | None

    def protect(self) -> None:
        self.protected, self.fresh = True, torch.zeros_like(self.residual)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The residual of each tensor, shaped like it."""
        for parameter in self.info.parameters:
            yield parameter.name, self.residual.narrow(0, parameter.offset, parameter.elements).view(parameter.shape)

    def accumulate(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        """Add the gradient to the residual wherever the sum is finite; whether somewhere it is not."""
        self._scale = scale
        wide = gradient.to(torch.float32)
        total = self.residual + (wide if scale is None else wide * scale.reciprocal())
        good = total.isfinite()
        torch.where(good, total, self.residual, out=self.fresh)
        return good.all().logical_not()

    def take(self, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Take elements, int64 [k] and all different, out of the residual, as they travel; rounding stays behind."""
        values = self.fresh.index_select(0, indices)
        largest = torch.finfo(dtype).max
        narrow = values if dtype == torch.float32 else values.clamp(-largest, largest).to(dtype)
        sent = narrow.to(torch.float32)
        self.fresh.index_copy_(0, indices, values - sent)
        self._indices, self._sent = indices, sent
        return narrow

    def write(self, gradient: Tensor, mean: Tensor) -> None:
        """Hand back a mean, float32. Where no scaler would halve its scale, what a 16-bit bucket cannot hold is cut and kept:
        the same mean would come again, and every step would be void."""
        if self._scale is not None:
            torch.mul(mean, self._scale, out=gradient)
            return
        if gradient.dtype in (torch.float16, torch.bfloat16) and not self.protected:
            largest = torch.finfo(gradient.dtype).max
            cut = mean.clamp(-largest, largest)
            self._excess, mean = mean.sub_(cut), cut
        gradient.copy_(mean)

    def settle(self, void: Tensor) -> None:
        """The step is over, and void or not, a bool of no dimension: make the residual what it should be."""
        if self.protected:
            torch.where(void, self.residual, self.fresh, out=self.residual)
        elif self._indices is not None and self._sent is not None:
            self.residual.index_add_(0, self._indices, torch.where(void, self._sent, 0.0))
        if self._excess is not None:
            self.residual.add_(torch.where(void, 0.0, self._excess))
        self._indices = self._sent = self._excess = None


class TopKRun(KeptRun):
    """The largest elements of each rank. The message, int32 words: whether it is spoilt, indices, values.

    Bytes: 8 * density * elements, 6 with values of 16 bits, gathered. Memory passes: those of `accumulate` and `torch.topk`.
    """

    def __init__(self, group: Group, start: int, codec: TopK, world: int, device: torch.device) -> None:
        super().__init__(group, start, codec, world, device)
        if self.info.elements >= 2**31:
            raise ExchangeError(f"{self.info.elements} elements in one bucket are too many for indices of 32 bits")
        self._codec, self._dtype, self._count = codec, NARROW[codec.values], 0

    def begin(
        self, gradient: Tensor, step: int, scale: Tensor | None, upload: Upload, riders: Tensor | None
    ) -> Collective:
        bad = self.accumulate(gradient, scale)
        self._count = self._codec.at(step).target(self.info)
        indices = torch.topk(self.fresh.abs(), self._count, sorted=False).indices
        values = self.take(indices, self._dtype)
        if values.element_size() == 2 and self._count % 2:
            values = torch.cat([values, values.new_zeros(1)])
        words = [bad.to(torch.int32).view(1), indices.to(torch.int32), values.view(torch.int32)]
        message = torch.cat(words)
        self._collective = Collective("gather", message, message.new_empty(self.world * message.numel()))
        return self._collective

    def end(self, gradient: Tensor, riders: Tensor | None) -> Tensor:
        assert self._collective is not None
        assert self._collective.output is not None
        messages = self._collective.output.view(self.world, -1)
        mean = torch.zeros(self.info.elements, device=self.device)
        for message in messages.unbind():  # in rank order; the indices of one differ, so each add is the only one
            _, indices, values = torch.split(message, [1, self._count, message.numel() - 1 - self._count])
            values = values.view(self._dtype).narrow(0, 0, self._count).to(torch.float32)
            mean.index_add_(0, indices, values, alpha=1.0 / self.world)
        self.write(gradient, mean)
        self._collective = None
        return messages.narrow(1, 0, 1).any()


class BlockRun(KeptRun):
    """One random block of each tensor, the same on all ranks. What is summed: the blocks, riders, and 0 or NaN.

    Bytes: 4 * (elements / ratio + riders + 1), all-reduced. Memory passes: those of `accumulate`.
    """

    rides = True

    def __init__(self, group: Group, start: int, codec: RandomBlock, world: int, device: torch.device) -> None:
        super().__init__(group, start, codec, world, device)
        self._codec = codec
        self._parameters = [parameter for parameter in self.info.parameters if parameter.elements]
        lengths = [max(1, int(parameter.elements / codec.ratio)) for parameter in self._parameters]
        within = [torch.arange(length) for length in lengths]
        self._within = torch.cat([torch.empty(0, dtype=torch.int64), *within]).to(device)

        def each(numbers: Sequence[int]) -> Tensor:
            """A number of each tensor, for every element of its block."""
            counts = torch.tensor(lengths, dtype=torch.int64)
            whole = torch.tensor(numbers, dtype=torch.int64)
            return torch.repeat_interleave(whole, counts, output_size=sum(lengths)).to(device)

        self._owners = each(range(len(lengths)))
        self._sizes = each([parameter.elements for parameter in self._parameters])
        self._offsets = each([parameter.offset for parameter in self._parameters])

    def begin(
        self, gradient: Tensor, step: int, scale: Tensor | None, upload: Upload, riders: Tensor | None
    ) -> Collective:
        bad = self.accumulate(gradient, scale)
        starts = upload([draw(self._codec.seed, step, p.name, p.elements) for p in self._parameters])
        indices = starts.index_select(0, self._owners).add_(self._within).remainder_(self._sizes).add_(self._offsets)
        flag = torch.where(bad, NAN, 0.0).to(torch.float32).view(1)
        aboard = [] if riders is None else [riders.to(torch.float32)]
        self._collective = Collective("sum", torch.cat([self.take(indices), *aboard, flag]))
        return self._collective

    def end(self, gradient: Tensor, riders: Tensor | None) -> Tensor:
        assert self._collective is not None
        assert self._indices is not None
        buffer = self._collective.tensor
        good = buffer.isfinite().all()  # the flag, riders, and sums of finite values that overflow
        count = self._indices.numel()
        values, aboard = torch.split(buffer, [count, buffer.numel() - count])
        mean = torch.zeros(self.info.elements, device=self.device)
        self.write(gradient, mean.index_copy_(0, self._indices, values * (1.0 / self.world)))
        if riders is not None:
            torch.mul(aboard.narrow(0, 0, riders.numel()), 1.0 / self.world, out=riders)
        self._collective = None
        return good.logical_not()


RUNS: Mapping[type[Codec], type[Run]] = {Cast: CastRun, TopK: TopKRun, RandomBlock: BlockRun}


def check(codec: Codec) -> None:
    """Refuse a codec whose kernels exist only for CPUs."""
    if type(codec) is not Dense and type(codec) not in RUNS:
        raise AttachError(f"{codec} does not run on CUDA yet; there are: dense, cast, topk, randomblock")
    if isinstance(codec, TopK) and codec.momentum:
        raise AttachError(f"{codec}: momentum does not run on CUDA yet; topk without it does")


class Parts:
    """Tensors that travel together, usually a bucket of DDP: runs that are compressed, dense spans, and small tensors.

    `begin` says what should travel, `end` writes the means, `settle` closes the step. The rules of what is compressed are
    those of `engine.layout`.
    """

    def __init__(
        self,
        tensors: Sequence[TensorInfo],
        codec: Codec,
        *,
        exclude: Exclude,
        min_elements: int,
        world: int,
        device: torch.device,
    ) -> None:
        self.names = tuple(tensor.name for tensor in tensors)
        self.world = world
        *starts, self.elements = [0, *itertools.accumulate(tensor.elements for tensor in tensors)]
        offsets = {tensor.name: (start, tensor.elements) for tensor, start in zip(tensors, starts, strict=True)}
        self.offsets = offsets
        self.runs: list[Run] = []
        self._spans: list[tuple[int, int]] = []
        small: list[str] = []
        for group in build([tensors], codec, exclude=exclude, min_elements=min_elements).groups:
            start = offsets[group.slots[0].name][0]
            if group.name.startswith(SMALL_GROUP):
                small += [slot.name for slot in group.slots]
            elif group.codec == "dense":
                self._spans.append((start, group.elements))
            else:
                self.runs.append(RUNS[type(codec)](group, start, codec, world, device))
                small += [slot.name for slot in group.slots if slot.role == "ride"]
        self._small: Tensor | None = None
        if small and self.runs:
            places = [torch.arange(offsets[name][0], sum(offsets[name])) for name in dict.fromkeys(small)]
            self._small = torch.cat(places).to(device)
        elif small:
            self._spans = [(0, self.elements)]  # nothing is compressed: all of it in one sum, where it lies
        self._carrier = next((run for run in self.runs if run.rides), None)
        self._riders: Tensor | None = None
        self.bytes = 0
        """What this rank handed to collectives in the last step."""

    @property
    def kept(self) -> list[KeptRun]:
        return [run for run in self.runs if isinstance(run, KeptRun)]

    def begin(self, flat: Tensor, step: int, scale: Tensor | None, upload: Upload) -> list[Collective]:
        """flat [elements], in the dtype of the tensors: this rank's gradients, which are used up."""
        parts = []
        if self._small is not None:
            self._riders = flat.index_select(0, self._small)
            flat.index_fill_(0, self._small, 0)
        for start, elements in self._spans:
            parts.append(Collective("sum", flat.narrow(0, start, elements).mul_(1.0 / self.world)))
        for run in self.runs:
            aboard = self._riders if run is self._carrier else None
            parts.append(run.begin(self._of(run, flat), step, scale, upload, aboard))
        if self._riders is not None and self._carrier is None:
            parts.append(Collective("sum", self._riders.mul_(1.0 / self.world)))
        self.bytes = sum(part.bytes for part in parts)
        return parts

    def end(self, flat: Tensor, tests: bool) -> Tensor | None:
        """All of it has arrived: leave the means in `flat`. Returns whether they are spoilt, if `tests`; then all of
        them are NaN."""
        flags = []
        for run in self.runs:
            flag = run.end(self._of(run, flat), self._riders if run is self._carrier else None)
            flags += [] if flag is None else [flag]
        if self._small is not None and self._riders is not None:
            flat.index_copy_(0, self._small, self._riders)
        self._riders = None
        if not tests:
            return None
        bad = flat.isfinite().all().logical_not()
        for flag in flags:
            bad = bad.logical_or(flag)
        flat.masked_fill_(bad, NAN)
        return bad

    @staticmethod
    def _of(run: Run, flat: Tensor) -> Tensor:
        return flat.narrow(0, run.start, run.info.elements)
