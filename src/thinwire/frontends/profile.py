"""The profile of a DDP job: watches some of its steps, then measures links and codecs between two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..engine.agree import agree, compile_kernels, problem_of
from ..engine.capacity import Capacity
from ..engine.layout import describe, kinds_of
from ..engine.method import Method
from ..errors import ThinwireError
from ..planner.profile import Profile, Tensor
from ..profiler import measure
from ..profiler.watch import Compute, Watch
from ..schemes.world import TorchWorld, ranks_per_node
from .ddp import parameters_of, plain

WATCHED, KEPT = 8, 3
"""Steps to watch, and of how many of them gradients are kept."""


class Profiling:
    """Watches a module from now on; after `WATCHED` steps `measure` can make a profile of it."""

    def __init__(self, module: DistributedDataParallel, on_step: Callable[[], None] = lambda: None) -> None:
        self.module = module
        self._named = parameters_of(module)
        self.watch = Watch(module, self._named, keep=range(WATCHED - KEPT, WATCHED), on_step=on_step)

    @property
    def ready(self) -> bool:
        """Whether enough steps were seen. All ranks see as many."""
        return len(self.watch.steps) >= WATCHED

    def begin(self) -> None:
        """Watch anew."""
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
        group, problem = self.module.process_group, None
        compute = Compute(0.0, 0.0, 0.0, 0.0, {})
        texts = list(measure.CANDIDATES if candidates is None else candidates)
        try:
            compute = self.watch.compute()
            methods = [Method.of(text) for text in texts]
        except (ThinwireError, ValueError) as error:
            problem, methods = problem_of(error), []
        agree(group, {"candidates": texts, "steps": len(self.watch.steps), "tensors": sorted(compute.ready)}, problem)
        for method in methods:
            compile_kernels(group, method)
        kinds = {plain(name): kind for name, kind in kinds_of(self.module.module).items()}
        infos = [describe(name, parameter, kinds.get(name)) for name, parameter in self._named.items()]
        tensors = [Tensor(info.name, info.elements, info.kind, info.dtype, 0.0, info.shape) for info in infos]
        world = TorchWorld(group, 1, None, *ranks_per_node(group))
        try:
            found = measure.measure(
                model or type(self.module.module).__name__,
                tensors,
                compute,
                self.watch.gradients,
                world,
                Capacity,
                candidates=candidates,
                budget=budget,
                rate=rate,
                buckets=self._buckets(),
            )
            dist.barrier(group=group)  # a peer may still be in the last collective
            return found
        finally:
            world.close()
