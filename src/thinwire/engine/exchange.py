"""Averages of named tensors without DDP, for training loops of any kind."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..codecs import Codec
from ..comm.world import LocalWorld, TorchWorld, ranks_per_node
from ..errors import AttachError, ExchangeError
from ..planner.plan import Plan
from .consensus import agree, problem_of
from .executor import Executor
from .layout import Exclude, Layout, TensorInfo, describe, excluded
from .lifecycle import Phase
from .rank_state import Safety
from .session import Job, Session
from .strategy import Strategy
from .warmup import compile_kernels
from .wire import Wire

GROUP_BYTES = 16 << 20


class Exchange(Wire):
    """Averages named tensors over ranks, with residuals kept from call to call.

    `process_group` may also be a `LocalWorld(n)`: then all n ranks live in this process, and `reduce_` takes one set of
    tensors for each. Making one is a collective. Every rank must give the same names, shapes and codec.

    `protected` keeps a copy of the residuals, so that a void step leaves them as they were, bit for bit.
    """

    def __init__(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        codec: Codec | str | Plan,
        process_group: dist.ProcessGroup | LocalWorld | None = None,
        *,
        chain: str | None = None,
        exclude: Exclude = (),
        min_elements: int = 1024,
        group_bytes: int = GROUP_BYTES,
        timeout: timedelta | None = None,
        protected: bool = False,
    ) -> None:
        error: str | None = None
        tensors: list[TensorInfo] = []
        layout = Layout(())
        facts: dict[str, Any] = {}
        strategy: Strategy | None = None
        if isinstance(process_group, LocalWorld):
            size, nodes = process_group.size, (process_group.ranks_per_node, "")
        else:
            size, nodes = dist.get_world_size(process_group), ranks_per_node(process_group)
        try:
            strategy = Strategy.of(codec, chain)
            named_tensors = dict(named_tensors)
            _check(named_tensors)
            tensors = [describe(name, tensor) for name, tensor in named_tensors.items()]
            strategy.check(tensors, size, nodes[0])
            layout = strategy.layout(_buckets(tensors, group_bytes), exclude, min_elements)
            facts = {
                **strategy.facts(),
                "tensors": tensors,
                "excluded": excluded(tensors, exclude),
                "options": (min_elements, group_bytes),
            }
        except Exception as problem:  # of any kind: the other ranks wait to hear of it
            if isinstance(process_group, LocalWorld):
                raise
            error = problem_of(problem)
        world: LocalWorld | TorchWorld
        if isinstance(process_group, LocalWorld):
            world = process_group
        else:
            agree(process_group, facts, error)
            assert strategy is not None
            compile_kernels(process_group, strategy)
            world = TorchWorld(process_group, 1, timeout, *nodes)
        assert strategy is not None
        safety = Safety(protected=protected, saturates=True)
        session = Session(world, strategy, Job(tuple(tensors), exclude, min_elements), safety)
        super().__init__(session)
        self._names = tuple(tensor.name for tensor in tensors)
        self._waiting = _Waiting(0)
        session.check_nodes(strategy)
        world.prepare(layout.places(session.place))
        session.use(session.make(layout))
        session.lifecycle.enter(Phase.COMPRESSED)

    @property
    def executor(self) -> Executor:
        """What exchanges by the layout, from the beginning."""
        assert self.session.executor is not None
        return self.session.executor

    def reduce_(self, tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]) -> None:
        """Replace every tensor by its mean over ranks, less what stays in the residuals. Blocks until it is done.

        A mapping from name to tensor, all names that the exchange was made with; for a `LocalWorld`, one for each rank.
        """
        ranks = [tensors] if isinstance(tensors, Mapping) else list(tensors)
        if len(ranks) != len(self.world.local_ranks):
            raise ExchangeError(f"{len(ranks)} sets of tensors were given for {len(self.world.local_ranks)} ranks")
        for given in ranks:
            if set(given) != set(self._names):
                odd = sorted(set(given) ^ set(self._names))
                raise ExchangeError(f"the names differ from those that the exchange was made with, first: {odd[0]!r}")
            for tensor in self.session.job.tensors:
                mine = given[tensor.name]
                if describe(tensor.name, mine, tensor.kind) != tensor or not mine.is_contiguous():
                    raise ExchangeError(f"{tensor.name!r} must be contiguous, {tensor.dtype}, of shape {tensor.shape}")
        for name in self._names:
            self.begin(name, [given[name] for given in ranks])
        self.end()

    def begin(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Hand over one tensor, contiguous, of each rank in this process; after all of them, `end` waits for the means."""
        if not self._waiting.left:
            self._waiting = _Waiting(len(self._names))
            self.session.read_scale()
        self.executor.submit((name,), [tensor.detach().view(-1) for tensor in tensors], self._waiting.done)

    def end(self) -> None:
        """Wait until every tensor that was handed over holds its mean."""
        if not self._names:
            return
        waiting = self._waiting
        if not self.executor.threaded and not waiting.finished.is_set():
            raise ExchangeError("the step did not come to its end, though all tensors were given")
        try:
            waiting.finished.wait()
        except BaseException:
            self.executor.close(ExchangeError("interrupted"))
            raise
        if waiting.error is not None:
            raise waiting.error


class _Waiting:
    """The tensors of one step that have no mean yet."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def done(self, error: BaseException | None) -> None:
        self.left -= 1
        self.error = self.error or error
        if self.left == 0 or error is not None:
            self.finished.set()


def _check(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu":
            raise AttachError(
                f"{name!r} is on {tensor.device}: Exchange takes tensors of the CPU; `attach` takes CUDA as well"
            )
        if not tensor.dtype.is_floating_point:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise AttachError(f"{name!r} is {dtype}: only real floating-point tensors can be exchanged")


def _buckets(tensors: Sequence[TensorInfo], limit: int) -> list[list[TensorInfo]]:
    """Tensors of one dtype in the order given, together up to `limit` bytes; a larger one stays alone."""
    buckets: list[list[TensorInfo]] = []
    size = 0
    for tensor in tensors:
        if not buckets or buckets[-1][0].dtype != tensor.dtype or size + 4 * tensor.elements > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(tensor)
        size += 4 * tensor.elements
    return buckets
