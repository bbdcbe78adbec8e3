"""Profiling of a DDP job: watches some of its steps, then measures links and codecs between two of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..comm.world import TorchWorld, ranks_per_node
from ..engine.consensus import agree, problem_of
from ..engine.ddp_module import parameters_of, plain
from ..engine.layout import describe, kinds_of
from ..engine.strategy import Strategy
from ..engine.warmup import compile_kernels
from ..errors import ThinwireError
from ..planner.profile import Profile, Tensor
from ..profiler import measure
from ..profiler.slices import THOROUGH, Effort, Work, finish
from ..profiler.watch import Compute, Watch

WATCHED, KEPT = 8, 3
"""Steps to watch, and of how many of them gradients are kept."""


class Profiling:
    """Watches a module from now on; after `WATCHED` steps `measure` can make a profile of it."""

    def __init__(self, module: DistributedDataParallel, on_step: Callable[[], None] = lambda: None) -> None:
        # A module and its wire would keep each other for ever: the garbage collector cannot look into DDP's hook.
        self._module = weakref.ref(module)
        self._named = parameters_of(module)
        self.watch = Watch(module, self._named, keep=range(WATCHED - KEPT, WATCHED), on_step=on_step)

    @property
    def module(self) -> DistributedDataParallel:
        module = self._module()
        assert module is not None, "a module that is gone cannot be measured"
        return module

    @property
    def ready(self) -> bool:
        """Whether enough steps were seen. All ranks see as many."""
        return len(self.watch.steps) >= WATCHED

    def begin(self) -> None:
        """Watch from the beginning."""
        self.watch.begin()

    def rest(self) -> None:
        """No further profile is wanted, but `on_step` still is."""
        self.watch.rest()

    def close(self) -> None:
        self.watch.close()

    def borders(self, profile: Profile) -> list[int]:
        """Where DDP's buckets end, as places in the order of the profile's tensors; see `planner.choose`."""
        width = {name: parameter.element_size() for name, parameter in self._named.items()}
        ends, size, waiting = [], 0, self._buckets()
        for place, tensor in enumerate(profile.tensors, start=1):
            size += tensor.elements * width[tensor.name]
            if waiting and size >= waiting[0]:
                size -= waiting.pop(0)
                ends.append(place)
        return ends

    def _buckets(self) -> list[int]:
        """Bytes of DDP's buckets, in the order in which they are exchanged."""
        said = self.module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        return [int(size) for size in str(said.get("rebuilt_bucket_sizes") or said["bucket_sizes"]).split(",")]

    def measure(
        self, *, candidates: Sequence[str] | None = None, budget: float = 15.0, model: str = "", rate: str = ""
    ) -> Profile:
        """Links and codecs, for about `budget` seconds, between two steps. A collective; the same profile on all ranks."""
        texts = list(measure.CANDIDATES if candidates is None else candidates)
        return finish(self.measuring(texts, budget, model=model, rate=rate))

    def measuring(
        self, candidates: Sequence[str], budget: float, effort: Effort = THOROUGH, model: str = "", rate: str = ""
    ) -> Work[Profile]:
        """The same with pauses, in which training may go on."""
        group, problem = self.module.process_group, None
        compute, strategies = Compute(0.0, 0.0, 0.0, 0.0, {}), dict[str, Strategy]()
        try:
            compute = self.watch.compute()
            strategies = {text: Strategy.of(text) for text in candidates}
        except (ThinwireError, ValueError) as error:
            problem = problem_of(error)
        steps = len(self.watch.steps)
        agree(group, {"candidates": list(candidates), "steps": steps, "tensors": sorted(compute.ready)}, problem)
        kinds = {plain(name): kind for name, kind in kinds_of(self.module.module).items()}
        infos = [describe(name, parameter, kinds.get(name)) for name, parameter in self._named.items()]
        tensors = [Tensor(info.name, info.elements, info.kind, info.dtype, 0.0, info.shape) for info in infos]
        world = TorchWorld(group, 1, None, *ranks_per_node(group))
        try:
            found = yield from measure.measuring(
                model or type(self.module.module).__name__,
                tensors,
                compute,
                self.watch.gradients,
                world,
                candidates=candidates,
                budget=budget,
                rate=rate,
                buckets=self._buckets(),
                effort=effort,
                prepare=lambda text: compile_kernels(group, strategies[text]),
            )
            dist.barrier(group=group)  # a peer may still be in the last collective
            return found
        finally:
            world.close()
