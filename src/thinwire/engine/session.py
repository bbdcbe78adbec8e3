"""Session of an exchange: what a wire, its checkpointer and its hook share, and the change from one executor to the next."""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from ..chains import tree
from ..codecs import Codec
from ..codecs.driver import all_finite
from ..comm.collectives import Collective, Place
from ..comm.world import TorchWorld, World
from ..errors import ChainError, ExchangeError, ThinwireError, WireClosed
from ..planner.plan import Plan
from . import interrupt
from .consensus import agree
from .executor import SLICE_SECONDS, ExchangeThread, Executor
from .layout import Exclude, Layout, TensorInfo
from .lifecycle import Lifecycle
from .rank_state import Safety
from .recorder import Progress, Recorder
from .strategy import Strategy


@dataclass(frozen=True)
class Job:
    """What never changes: tensors in the order in which they come, and which of them travel dense whatever the codec."""

    tensors: tuple[TensorInfo, ...]
    exclude: Exclude = ()
    min_elements: int = 1024


@dataclass
class DirectSteps:
    """Steps whose means went straight to the optimizer. `void` is the number of the last one that was void."""

    count: int = 0
    void: int = 0
    skipped: int = 0
    last: bool = False
    """Whether the last step was one of them."""


class Session:
    """The exchange of one job. It knows neither the wire nor the hook that use it, so it ends with them."""

    def __init__(
        self, world: World, strategy: Strategy, job: Job, safety: Safety, scaler: GradScaler | None = None
    ) -> None:
        self.world, self.strategy, self.job, self.safety, self.scaler = world, strategy, job, safety, scaler
        self.executor: Executor | None = None
        self.settings: dict[str, float] = {}
        self.progress, self.direct = Progress(), DirectSteps()
        self.seen: list[tuple[str, ...]] = []
        """The names of the tensors in each bucket of the last step, where buckets come from DDP."""
        self.partition: list[tuple[str, ...]] | None = None
        """What one all-reduce takes in dense steps, where it is not what comes along."""
        self.control_partition: list[tuple[str, ...]] = []
        """The same for control steps: DDP's buckets when the first of them was agreed on."""
        self.lifecycle = Lifecycle()
        self.recorder = Recorder(world.local_ranks[0], world.size, world.ranks_per_node)
        self._infos = {tensor.name: tensor for tensor in job.tensors}
        self._lock = threading.Lock()
        self._thread: ExchangeThread | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        interrupt.watch(self)

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps by the layout."""
        return self.executor.rank_states[0].step if self.executor is not None else 0

    @property
    def steps(self) -> int:
        """Steps since training began, those before a resume included."""
        return self.progress.dense_steps + self.step

    @property
    def place(self) -> Place:
        return Place(self.world.local_ranks[0], self.world.size, self.world.ranks_per_node)

    @property
    def waiting(self) -> bool:
        """Whether a caller waits for a result."""
        return self.executor is not None and self.executor.busy

    def strategy_now(self) -> Strategy:
        """The strategy with its numbers of the next step."""
        return self.strategy.at(self.step, self.settings)

    def check_open(self) -> None:
        if (error := self.lifecycle.error) is not None:
            raise WireClosed(f"this wire is closed: {error}") from error

    def agree(self, facts: dict[str, object], problem: str | None) -> bool:
        """Compare facts over all ranks; False where all ranks live in this process, so that there is nothing to compare."""
        if isinstance(self.world, TorchWorld):
            agree(self.world.parent, facts, problem)
            return True
        return False

    def meet(self, purpose: str) -> None:
        """Meet all ranks for the same purpose, at the same step."""
        self.check_open()
        busy = "an exchange is under way" if self.waiting else None
        if not self.agree({"purpose": purpose, "step": self.steps}, busy) and busy is not None:
            raise ExchangeError(f"{purpose}: {busy}")

    # -- layouts and executors -----------------------------------------------------------------------------------------

    def layout(self, buckets: Sequence[Sequence[TensorInfo]], strategy: Strategy | None = None) -> Layout:
        """How this session, or one with another strategy, cuts these buckets."""
        return (strategy or self.strategy).layout(buckets, self.job.exclude, self.job.min_elements)

    def buckets(self) -> list[list[TensorInfo]]:
        """How tensors come: in DDP's buckets, those of the layout, or, as long as nothing is known, all together."""
        if self.seen:
            return [[self._infos[name] for name in names] for names in self.seen]
        return self.executor.layout.buckets() if self.executor is not None else [list(self.job.tensors)]

    def make(self, layout: Layout, strategy: Strategy | None = None) -> Executor:
        """An executor for a layout, which nothing uses yet."""
        executor = Executor(
            self.world,
            layout,
            safety=self.safety,
            direct=(strategy or self.strategy).direct,
            recorder=self.recorder,
            progress=self.progress,
            lifecycle=self.lifecycle,
        )
        for rank_state in executor.rank_states:
            rank_state.adjust(self.settings)
        return executor

    def use(self, executor: Executor) -> None:
        """From now on exchange by this executor."""
        if self.executor is not None:
            self.executor.stop()
        if self._finalizer is not None:
            self._finalizer.detach()
        if isinstance(self.world, TorchWorld):
            self._thread = self._thread or ExchangeThread()
            executor.run_in(self._thread)
            # When the session is forgotten, and before the interpreter goes down under a thread that still runs.
            # Weakly: an error that closed the executor refers to the frames it passed, and so to the session itself.
            self._finalizer = weakref.finalize(self, _stop, weakref.ref(executor), self._thread)
        groups = [tuple(slot.name for slot in group.slots) for group in executor.layout.groups]
        self.partition = groups if self.strategy.direct else None
        self.executor = executor
        self.record_layout()

    def freeze(self) -> Executor:
        """DDP's buckets are final: from now on exchange by their layout."""
        executor = self.make(self.layout(self.buckets()))
        self.use(executor)
        return executor

    def record_layout(self) -> None:
        if self.executor is not None:
            self.recorder.layout(self.steps, self.strategy.full, self.executor.layout, self.strategy.plan)
            self.recorder.fits(self.executor.rank_states[0], fresh=False)

    def change(self, codec: Codec | str | Plan, chain: str | None, *, keep: bool) -> None:
        """See `Wire.change`."""
        old, problem, chosen = self.executor, None, self.strategy
        try:
            chosen = Strategy.of(codec, chain)
            chosen.check(self.job.tensors, self.world.size, self.world.ranks_per_node)
            self.check_nodes(chosen)
            if self.waiting:
                raise ExchangeError("a codec is changed between two steps, not while one is under way")
        except ThinwireError as error:
            if not isinstance(self.world, TorchWorld):
                raise
            problem = str(error)
        self.agree({**chosen.facts(), "step": self.step}, problem)
        self.strategy, self.progress.control = chosen, 0
        self.settings = {name: value for name, value in self.settings.items() if name in chosen.adjustable}
        self.recorder.event(self.steps, "codec", f"from now on {chosen.full}")
        if old is None:
            self.world.prepare(self.layout([self.job.tensors]).places(self.place))
            return
        layout = self.layout(self.buckets())
        self.world.prepare(layout.places(self.place))
        executor = self.make(layout)
        for rank_state, before in zip(executor.rank_states, old.rank_states, strict=True):
            if keep:
                rank_state.fold(before.unsent())
            rank_state.skipped, rank_state.scale = before.skipped, before.scale
            rank_state.begin(before.step)
        executor.statistics.skipped = old.statistics.skipped
        self.use(executor)

    def control(self, steps: int) -> None:
        """Make one of the next steps a control step, the next one if `steps` is 1. All ranks call it alike, between steps.

        Its gradients travel dense and exactly. Residuals, thresholds, capacities and all that codecs remember stay as they
        are, as if it had not been: the step of the layout does not count it.
        """
        if self.executor is None or self.strategy.direct:
            raise ExchangeError("a control step needs a layout that compresses: there is nothing to compare")
        self.progress.control = steps
        self.control_partition = self.control_partition or list(self.seen)

    def check_nodes(self, strategy: Strategy) -> None:
        for chain in strategy.chains:
            if tree.parse(chain).hierarchical and self.world.ranks_per_node is None:
                raise ChainError(f"{chain!r} needs nodes: {self.world.why}")

    # -- values that are not finite ------------------------------------------------------------------------------------

    def take_scaler(self, scaler: GradScaler) -> None:
        """Gradients are multiplied by the scale of this scaler from the next step on."""
        self.scaler, self.safety = scaler, replace(self.safety, protected=True, saturates=False)
        self._protect()

    def guard(self) -> None:
        """An optimizer skips steps that are not finite: means are tested from the next step on, dense ones too."""
        self.safety = replace(self.safety, tests_results=True)
        self._protect()

    def _protect(self) -> None:
        for rank_state in self.executor.rank_states if self.executor is not None else ():
            rank_state.protect(self.safety)

    def read_scale(self) -> None:
        """A step begins: by how much are its gradients too large?"""
        if self.scaler is not None and self.executor is not None:
            for rank_state in self.executor.rank_states:
                rank_state.scale = float(self.scaler.get_scale())

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last step was void on all ranks, because a gradient was not finite somewhere."""
        if self.direct.last:
            return self.direct.count == self.direct.void
        return self.executor is not None and self.executor.rank_states[0].last_void

    def inspect_direct(self, result: Tensor, step: int) -> None:
        """Test a dense mean, where a step that is not finite is skipped. It is the same on all ranks."""
        tests = self.safety.tests_results or self.safety.protected or not self.strategy.direct
        if tests and not all_finite(result):
            with self._lock:
                first = self.direct.void != step
                self.direct.skipped += first
                self.direct.void = step
            if first:
                self.recorder.event(self.steps, "skipped", "a dense mean is not finite: the step is void")

    # -- outside of steps ----------------------------------------------------------------------------------------------

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace one tensor of each rank in this process by its plain mean, outside of any step. Every rank calls it alike."""
        self.check_open()
        woken = threading.Event()
        pending = self.world.issue(0, [Collective("average", tensor) for tensor in tensors], woken.set)
        try:
            while not pending.done():
                woken.wait(SLICE_SECONDS)
            pending.check()
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                place = f"all-reduce (average) outside of steps, rank {self.world.local_ranks[0]}"
                raise ExchangeError(f"{place}: {error}") from error
            raise

    def interrupt(self) -> None:
        if self.executor is not None:
            self.executor.interrupt()

    def close(self, error: BaseException | None = None) -> None:
        """End the exchange thread and give up the process groups."""
        self.lifecycle.close(error)
        if self.executor is not None:
            self.executor.close()
        else:
            self.world.close()


def _stop(reference: weakref.ref[Executor], thread: ExchangeThread) -> None:
    if (executor := reference()) is not None:
        executor.stop()
    thread.close()
