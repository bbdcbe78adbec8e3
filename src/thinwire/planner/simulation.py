"""Plan searches and baselines for GPUs, on a published model and a network, with the side-stream recurrence."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import PlanError
from ..kernels.cpu._jit import Doubles, Offsets
from ..suggest import suggest
from . import SEARCHES, pareto, side_stream, timeline
from .costs import GpuCodec, durations
from .network import Network
from .options import Menu, Option, Table
from .plan import Operation
from .published import PublishedTensor

JOINT_WIDTH = 48
SMALL = 0.0005
"""Fraction of all elements, and of backward, below which a tensor stays in the group of the tensor before it."""
OFFLOAD_COMBINATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search.

    seconds  forward and F; groups: (first tensor, one past the last, index of the option)
    proven   whether the plan is optimal of its kind under the recurrence
    """

    search: str
    seconds: float
    groups: list[tuple[int, int, int]]
    search_seconds: float
    search_cpu_seconds: float
    proven: bool = False


class Simulation:
    """One model on one network.

    forward           seconds before backward, added to all results
    cpu               codecs may also run on the CPU
    max_compressions  most compressions along a chain
    """

    def __init__(
        self,
        model: str,
        tensors: Sequence[PublishedTensor],
        codecs: Sequence[GpuCodec],
        network: Network,
        *,
        forward: float = 0.0,
        cpu: bool = False,
        max_compressions: int = 4,
    ) -> None:
        if not tensors:
            raise PlanError(f"the model {model!r} has no tensors")
        self.model, self.tensors, self.network, self.forward, self.cpu = model, list(tensors), network, forward, cpu
        self.elements = np.array([tensor.elements for tensor in tensors], np.float64)
        self.compute = np.array([1e-6 * tensor.microseconds for tensor in tensors])
        self.menu = Menu(codecs, network, cpu=cpu, max_compressions=max_compressions)
        self.bound = forward + float(self.compute.sum())

    def search(self, name: str) -> Outcome:
        """fp32: no compression. all: compress every tensor, with the chain that is shortest for it in isolation. myopic: the
        shortest chain in isolation, compressed or not. espresso: Algorithms 1 and 2. exact: optimal options per tensor.
        joint: groups and their options together."""
        searches: dict[str, Callable[[], tuple[list[tuple[int, int, int]], bool]]] = {
            "fp32": lambda: (self._alone(0, self.menu.dense), False),
            "all": lambda: (self._alone(self.menu.dense, len(self.menu.options)), False),
            "myopic": lambda: (self._alone(0, len(self.menu.options)), False),
            "espresso": lambda: (self._espresso(), False),
            "exact": self._exact,
            "joint": self._joint,
        }
        if name not in searches:
            raise PlanError(f"there is no search {name!r}; {suggest(name, searches)}")
        start, worked = time.perf_counter(), time.thread_time()
        groups, proven = searches[name]()
        spent, worked = time.perf_counter() - start, time.thread_time() - worked
        return Outcome(name, self.seconds(groups), groups, spent, worked, proven)

    def seconds(self, groups: Sequence[tuple[int, int, int]]) -> float:
        """Forward and F of a plan."""
        return self.forward + float(side_stream.finish_time(*self._lay_out(groups)))

    def option(self, number: int) -> Option:
        return self.menu.options[number]

    # -- the searches --------------------------------------------------------------------------------------------------

    def _table(self, only: Offsets | None = None) -> Table:
        """The Pareto-optimal options of each tensor."""
        sizes, owner = np.unique(self.elements, return_inverse=True)
        return _gather(self.menu.table(sizes, only), owner)

    def _alone(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Per tensor the option of [start, stop) with the least total time in isolation."""
        sizes, owner = np.unique(self.elements, return_inverse=True)
        if stop <= start:
            raise PlanError("this search needs a codec")
        only = np.arange(start, stop)
        vector = self.menu.vectors(sizes, only)
        best = start + np.argmin(vector[:, :, side_stream.LEAD] + vector[:, :, 1] + vector[:, :, 3], axis=0)
        return [(i, i + 1, int(best[size])) for i, size in enumerate(owner)]

    def _espresso(self) -> list[tuple[int, int, int]]:
        table = self._table(self.menu.gpu_only if self.cpu else None)
        groups = self._alone(0, self.menu.dense)
        compute, vector = self._lay_out(groups)
        picks = np.full(len(compute), -1)
        order = np.array(sorted(range(len(compute)), key=lambda i: (-self.elements[i], -i)))
        side_stream.improve(compute, vector, picks, order, table.offsets, table.vector)
        chosen = [int(table.ids[pick]) if pick >= 0 else group[2] for pick, group in zip(picks, groups, strict=True)]
        if self.cpu:
            self._offload(compute, vector, chosen)
        return [(i, i + 1, option) for i, option in enumerate(chosen)]

    def _offload(self, compute: Doubles, vector: Doubles, chosen: list[int]) -> None:
        """Algorithm 2, for the compressed tensors."""
        alike: dict[tuple[float, int], list[int]] = {}
        for i, option in enumerate(chosen):
            if self.option(option).codec is not None:
                alike.setdefault((self.elements[i], option), []).append(i)
        if not alike:
            return
        moved = vector.copy()
        for (size, option), members in alike.items():
            target = np.array([self.menu.on_cpu[option]])
            moved[members] = self.menu.vectors(np.array([size]), target)[0, 0]
        groups = list(alike.values())
        edges = np.cumsum([0, *map(len, groups)])
        counts = np.zeros(len(groups), np.int64)
        flat = np.array([i for members in groups for i in members])
        side_stream.offload(compute, vector, moved, flat, edges, OFFLOAD_COMBINATIONS, counts)
        for members, count in zip(groups, counts, strict=True):
            for i in members[:count]:
                chosen[i] = self.menu.on_cpu[chosen[i]]

    def _exact(self) -> tuple[list[tuple[int, int, int]], bool]:
        table = self._table()
        problem = pareto.singles(self.compute, table.offsets, table.vector)
        # With the CPU as a third clock there can be too many states to keep; the greedy plan may then be better.
        found = pareto.solve(problem, limit=256 if self.cpu else 0)
        groups = [(start, stop, int(table.ids[row])) for start, stop, row in found.groups]
        if found.cut:
            return self._spared(self._better(groups, self._espresso())), False
        return self._spared(groups), True

    def _joint(self) -> tuple[list[tuple[int, int, int]], bool]:
        exact, _ = self._exact()
        edges = self._edges()
        compute = np.add.reduceat(self.compute, edges[:-1])
        total = np.concatenate([[0.0], np.cumsum(self.elements)])[edges]
        lengths = pareto.lengths_up_to(len(compute))
        stops, kinds = np.divmod(np.arange((len(compute) + 1) * len(lengths)), len(lengths))
        valid = stops >= lengths[kinds]
        sizes = total[stops[valid]] - total[stops[valid] - lengths[kinds[valid]]]
        distinct, owner = np.unique(sizes, return_inverse=True)
        candidates = self.menu.candidates(float(distinct[0]), float(total[-1]))
        table = _gather(self.menu.table(distinct, np.union1d(candidates, self._table().ids)), owner)
        counts = np.zeros(len(valid), np.int64)
        counts[valid] = np.diff(table.offsets)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        found = pareto.solve(pareto.Problem(compute, lengths, offsets, table.vector), JOINT_WIDTH)
        groups = [(int(edges[start]), int(edges[stop]), int(table.ids[row])) for start, stop, row in found.groups]
        return self._spared(self._better(groups, exact)), False

    def _edges(self) -> Offsets:
        """Possible ends of groups: not before a tensor that adds almost nothing to the group's size and ready time."""
        small = (self.elements < SMALL * self.elements.sum()) & (self.compute < SMALL * self.compute.sum())
        return np.concatenate([[0], 1 + np.flatnonzero(~small[1:]), [len(small)]])

    def _spared(self, groups: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The plan without the compressions that do not shorten the step, the largest groups first."""
        compute, vector = self._lay_out(groups)
        sizes = np.add.reduceat(self.elements, [start for start, _, _ in groups])
        plain = self.menu.vectors(sizes, np.arange(self.menu.dense))
        best, limit = np.argmin(plain[:, :, side_stream.SER], axis=0), side_stream.finish_time(compute, vector)
        found = list(groups)
        for at in np.argsort(-sizes, kind="stable"):
            start, stop, option = groups[at]
            if self.option(option).codec is not None:
                before = vector[at].copy()
                vector[at] = plain[best[at], at]
                if side_stream.finish_time(compute, vector) <= limit:
                    found[at] = (start, stop, int(best[at]))
                else:
                    vector[at] = before
        return found

    def _better(self, *plans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return min(plans, key=self.seconds)

    # -- what a plan does ----------------------------------------------------------------------------------------------

    def _lay_out(self, groups: Sequence[tuple[int, int, int]]) -> tuple[Doubles, Doubles]:
        """Compute time and costs of each group."""
        starts = [start for start, _, _ in groups]
        compute, sizes = np.add.reduceat(self.compute, starts), np.add.reduceat(self.elements, starts)
        vector = np.zeros((len(groups), 4))
        numbers = np.array([option for _, _, option in groups])
        for option in np.unique(numbers):
            mine = np.flatnonzero(numbers == option)
            vector[mine] = self.menu.vectors(sizes[mine], np.array([option]))[0]
        return compute, vector

    def chain(self, group: tuple[int, int, int]) -> list[tuple[str, str, float]]:
        """Operations of a group: name, lane (gpu, cpu, intra, inter, flat), seconds."""
        start, stop, number = group
        option = self.option(number)
        found = durations(option.leaf, float(self.elements[start:stop].sum()), option.codec, self.network)
        return [(str(op), op.scope or op.device or "gpu", seconds) for op, seconds in found]

    def operations(self, groups: Sequence[tuple[int, int, int]]) -> list[tuple[Operation, ...]]:
        """Start and end of each operation under the recurrence, in seconds since the start of backward."""
        compute, vector = self._lay_out(groups)
        spans = []
        for group, (ready, begin, _) in zip(groups, side_stream.schedule(compute, vector).tolist(), strict=True):
            chain = self.chain(group)
            leads = next(at for at, (_, lane, _) in enumerate(chain) if lane not in ("gpu", "cpu"))
            # The lead starts when the tensor is ready, or when the CPU is free; the rest when the stream is free.
            clock = max(ready, begin - sum(seconds for _, _, seconds in chain[:leads])) if leads else begin
            found = []
            for at, (name, lane, seconds) in enumerate(chain):
                clock = max(clock, begin) if at == leads else clock
                found.append(Operation(name, lane, clock, clock + seconds))
                clock += seconds
            spans.append(tuple(found))
        return spans

    def events(self, groups: Sequence[tuple[int, int, int]]) -> float:
        """Forward and the end of the plan in the event simulation: chains overlap, decoding interrupts backward, codecs on the
        CPU queue, and all communication is one lane, as in the paper's figures."""
        chains = [
            [(lane if lane in ("gpu", "cpu") else "comm", seconds) for _, lane, seconds in self.chain(group)]
            for group in groups
        ]
        compute, _ = self._lay_out(groups)
        return self.forward + timeline.run(compute.tolist(), chains, in_order=True).seconds


def _gather(table: Table, owner: Offsets) -> Table:
    """Expand a table of distinct sizes to one entry per owner."""
    counts = np.diff(table.offsets)[owner]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.arange(offsets[-1]) + np.repeat(table.offsets[owner] - offsets[:-1], counts)
    return Table(offsets, table.ids[rows], np.ascontiguousarray(table.vector[rows]))


def warm_up() -> None:
    """Load or compile the kernels of all searches, so that search times do not include compilation."""
    tensors = [PublishedTensor(f"t{i}", 3_000_000, 100.0) for i in range(3)]
    codec = GpuCodec("none", "", 1e-4, 1e-4, 0.5, 0.1, 0.0, False, 8)
    simulation = Simulation("warm-up", tensors, [codec], Network(2, 2, 1e10, 1e9), cpu=True)
    for name in SEARCHES:
        simulation.search(name)
