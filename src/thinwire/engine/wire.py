"""What a user holds: the exchange of one job, with its numbers, its saved state and its guard."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..codecs import Codec
from ..errors import AttachError, ChainError, ExchangeError, ThinwireError
from ..kernels.finite import all_finite
from ..log import logger
from ..planner.plan import Plan
from ..schemes import tree
from ..schemes.collective import Place
from ..schemes.world import TorchWorld, World
from . import interrupt, words
from .agree import agree
from .checkpoint import Checkpoint
from .layout import Exclude, Layout, TensorInfo
from .method import Method
from .recorder import Recorder, make_sink
from .runner import Runner, Seat


class Wire(Checkpoint):
    """Base of `Exchange` and of what `attach` returns. Until its layout is frozen there is no runner."""

    def __init__(
        self,
        world: World,
        method: Method,
        tensors: Sequence[TensorInfo],
        *,
        exclude: Exclude = (),
        min_elements: int = 1024,
        protected: bool = False,
        tracks_unused: bool = False,
    ) -> None:
        self.world, self.method, self.tensors = world, method, list(tensors)
        self._exclude, self._min_elements = exclude, min_elements
        self.runner: Runner | None = None
        self.settings: dict[str, float] = {}
        self.dense_steps = 0
        self._partition = None
        self._protected, self._tracks_unused = protected, tracks_unused
        self._guarded = False
        self._scaler: GradScaler | None = None
        self._direct_steps = self._direct_skipped = self._direct_void = 0
        self._went_direct = False
        self._lock = threading.Lock()
        self._seat: Seat | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._recorder = Recorder(world.members[0], world.size, world.ranks_per_node)
        interrupt.watch(self)

    @property
    def direct(self) -> bool:
        """Whether its exchange is nothing but the all-reduce of the gradients, in their own dtype."""
        return self.method.direct

    @property
    def plan(self) -> Plan | None:
        """The plan that it follows, if there is one."""
        return self.method.plan

    # -- running -------------------------------------------------------------------------------------------------------

    def freeze(self, layout: Layout) -> Runner:
        """From now on exchange by this layout."""
        return self._use(self._make(layout))

    def _make(self, layout: Layout) -> Runner:
        runner = Runner(
            self.world,
            layout,
            protected=self._protected,
            tests_results=self._guarded or self._protected,
            tracks_unused=self._tracks_unused,
            saturates=self._scaler is None,
            recorder=self._recorder,
            number=_counter(weakref.ref(self)),
        )
        for member in runner.members:
            member.adjust(self.settings)
        return runner

    def _use(self, runner: Runner) -> Runner:
        if self.runner is not None:
            self.runner.stop()
        if self._finalizer is not None:
            self._finalizer.detach()  # it would keep the residuals of the old runner
        if isinstance(self.world, TorchWorld):
            self._seat = self._seat or Seat()
            runner.take(self._seat)
            # When the wire is forgotten, and before the interpreter goes down under a thread that still runs.
            self._finalizer = weakref.finalize(self, _leave, runner, self._seat)
        self.runner = runner
        self._tell_layout()
        return runner

    def change(self, codec: Codec | str | Plan, chain: str | None = None, *, keep: bool = True) -> None:
        """Go over to another codec, chain or plan, between two steps. A collective: every rank calls it alike.

        What was not sent yet is not lost: each rank folds what it holds into its residual, or into its next gradient
        where the new chain has no residual for whole gradients; unless `keep` is false. What the codec had learnt is forgotten.
        """
        old, problem, chosen = self.runner, None, self.method
        try:
            chosen = Method.of(codec, chain)
            chosen.check(self.tensors, self.world.size, self.world.ranks_per_node)
            self._check_nodes(chosen)
            if old is not None and old.busy:
                raise ExchangeError("a codec is changed between two steps, not while one is under way")
        except ThinwireError as error:
            if not isinstance(self.world, TorchWorld):
                raise
            problem = str(error)
        if isinstance(self.world, TorchWorld):
            step = old.members[0].step if old is not None else 0
            agree(self.world.parent, {**chosen.facts(), "step": step}, problem)
        self.method = chosen
        self.settings = {name: value for name, value in self.settings.items() if name in chosen.adjustable}
        self._recorder.event(self.steps, "codec", f"from now on {chosen.full}")
        if old is None:
            self.world.prepare(self._layout([self.tensors]).places(self._place()))
            return
        layout = self._layout(self._buckets_of(old))
        self.world.prepare(layout.places(self._place()))
        runner = self._make(layout)
        for member, before in zip(runner.members, old.members, strict=True):
            if keep:
                member.fold(before.left())
            member.skipped, member.scale = before.skipped, before.scale
            member.begin(before.step)
        runner.statistics.skipped = old.statistics.skipped
        self._use(runner)

    def _place(self) -> Place:
        return Place(self.world.members[0], self.world.size, self.world.ranks_per_node)

    def _layout(self, buckets: Sequence[Sequence[TensorInfo]], method: Method | None = None) -> Layout:
        return (method or self.method).layout(buckets, self._exclude, self._min_elements)

    def _buckets_of(self, runner: Runner) -> Sequence[Sequence[TensorInfo]]:
        """How the tensors come that this runner exchanges."""
        return runner.layout.buckets()

    def _check_nodes(self, method: Method) -> None:
        for chain in method.chains:
            if tree.parse(chain).hierarchical and self.world.ranks_per_node is None:
                raise ChainError(f"{chain!r} needs nodes: {self.world.why}")

    @property
    def waiting(self) -> bool:
        """Whether somebody waits for a result."""
        return self.runner is not None and self.runner.busy

    def interrupt(self) -> None:
        if self.runner is not None:
            self.runner.interrupt()

    def close(self) -> None:
        """End the exchange thread and give up the process groups of this wire. The job cannot go on with it."""
        if self.runner is not None:
            self.runner.close()
        else:
            self.world.close()

    @property
    def error(self) -> BaseException | None:
        """What closed this wire, if it is closed."""
        return self.runner.error if self.runner is not None else None

    def set(self, **settings: float) -> None:
        """Change numbers of the codec from the next step on, as in `wire.set(density=0.001)`.

        A collective, to be called on every rank between two steps: all must say the same. It takes the place of a schedule,
        and is saved with the state.
        """
        problem: str | None = None
        try:
            for name in settings:
                if name not in self.method.adjustable:
                    known = ", ".join(self.method.adjustable) or "nothing"
                    raise ValueError(f"{self.method} cannot change {name!r} while training; it can: {known}")
            self.method.at(0, settings)
            if self.runner is not None and self.runner.busy:
                raise ValueError("an exchange is under way: change the codec between two steps")
        except (TypeError, ValueError) as error:
            problem = str(error)
        if isinstance(self.world, TorchWorld):
            step = self.runner.members[0].step if self.runner is not None else 0
            agree(self.world.parent, {"settings": sorted(settings.items()), "step": step}, problem)
        elif problem is not None:
            raise AttachError(problem)
        self.settings |= settings
        if self.runner is not None:
            for member in self.runner.members:
                member.adjust(settings)
        self._recorder.event(self.steps, "settings", f"from the next step on {self._method_now().full}")
        if self.world.members[0] == 0:
            logger.info("from the next step on: %s", self._method_now())

    def _method_now(self) -> Method:
        """The method with its numbers of the next step."""
        return self.method.at(self.runner.members[0].step if self.runner is not None else 0, self.settings)

    # -- numbers -------------------------------------------------------------------------------------------------------

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last step was void on all ranks, because a gradient was not finite somewhere."""
        if self._went_direct:
            return self._direct_steps == self._direct_void
        return self.runner is not None and self.runner.members[0].last_off

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank, means over steps: bytes it hands to collectives, seconds by phase, density, residual norm."""
        stats: dict[str, Any] = {
            "codec": str(self._method_now()),
            "chain": self.method.chain,
            "world": self.world.size,
            "dense_steps": self.dense_steps,
        }
        if self.runner is None:
            return {**stats, "steps": 0, "skipped": self._direct_skipped, "bytes_per_step": 0.0, "groups": []}
        member, statistics = self.runner.members[0], self.runner.statistics
        return {
            **stats,
            "rank": member.rank,
            **statistics.to_dict(),
            "skipped": statistics.skipped + self._direct_skipped,
            "residual_norm": member.residuals.norm(),
            "memory_bytes": member.bytes,
        }

    def stats_of_all_ranks(self) -> list[dict[str, Any]]:
        """`stats()` of every rank, in rank order. A collective. The rank with the least `wire_seconds` is the straggler."""
        if not isinstance(self.world, TorchWorld):
            return [self.stats()]
        return words.gather(self.stats(), self.world.parent)

    def log_to(self, target: Any = None, *, every: int = 1, summary: int = 100, residual_every: int = 50) -> None:
        """Write down what every step takes and sends, from the next one on. Not a collective; may be called several times.

        target          a path ending in .jsonl: JSON lines of rank 0; another path: a folder, with a file of each rank.
                        An object with `add_scalar` (TensorBoard's SummaryWriter): scalars of rank 0. A function: is given
                        each line as a dict, in the exchange thread. None: only the summary
        every           write every so many steps
        summary         say on rank 0, in the log, what a step takes, every so many steps; 0: never
        residual_every  compute the norm of the residuals every so many steps, a pass over memory; 0: never

        `thinwire top` and `thinwire report` read what is written; `docs/report.md` says what each number means.
        """
        for name, value, least in (
            ("every", every, 1),
            ("summary", summary, 0),
            ("residual_every", residual_every, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, not {value!r}")
        recorder = self._recorder
        sink = None if target is None else make_sink(target, self.world.members[0])
        recorder.every, recorder.summary_every, recorder.residual_every = every, summary, residual_every
        recorder.active = True
        if sink is not None:
            recorder.add(sink, self.method.full)
            self._tell_layout()

    def note(self, *, step: int | None = None, **values: float) -> None:
        """Put numbers of your own into the log, such as `wire.note(loss=loss.item())` after backward."""
        self._recorder.note(self.steps if step is None else step, values)

    def trace(self, steps: int = 20) -> None:
        """Write down when every piece of the next steps happens: for `thinwire report --trace`, and its timeline.

        Spans go where `log_to` writes, step by step, and are not kept in memory.
        """
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number from 1 on, not {steps!r}")
        if not self._recorder.active:
            raise ExchangeError("a trace is written to the log: call wire.log_to(...) first")
        self._recorder.trace(steps)

    def _tell_layout(self) -> None:
        if self.runner is not None:
            self._recorder.layout(self.steps, self.method.full, self.runner.layout, self.plan)

    # -- mixed precision and non-finite values -------------------------------------------------------------------------

    def scaled_by(self, scaler: GradScaler) -> None:
        """Gradients are multiplied by this scaler's scale. A collective, to be called on every rank before a step.

        The same as `attach(..., scaler=scaler)`, for a scaler that is made later: residuals are then kept unscaled, and are
        as before, bit for bit, after a step that the scaler skips.
        """
        problem = None
        if not isinstance(scaler, GradScaler):
            problem = f"scaled_by needs a torch.amp.GradScaler, not {type(scaler).__name__}"
        elif self.runner is not None and self.runner.busy:
            problem = "an exchange is under way: name the scaler between two steps"
        if isinstance(self.world, TorchWorld):
            agree(self.world.parent, {"scaler": problem is None and scaler.is_enabled()}, problem)
        elif problem is not None:
            raise AttachError(problem)
        if not scaler.is_enabled():
            return  # it does not skip a step that is not finite
        self._scaler, self._protected = scaler, True
        if self.runner is not None:
            for member in self.runner.members:
                member.tests_results, member.saturates = True, False
                member.residuals.protected = True
                for index in range(len(member.groups)):
                    member.residuals.protect(index, everything=True)

    def _look_at_scale(self) -> None:
        """A step begins: by how much are its gradients too large?"""
        if self._scaler is not None and self.runner is not None:
            for member in self.runner.members:
                member.scale = float(self._scaler.get_scale())

    def guard(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` do nothing, on all ranks, after a step in which a gradient was not finite.

        For jobs without a GradScaler. The gradients of such a step are dropped; see `docs/message-format.md` for how
        ranks agree. Schedulers and counters of your own still advance.
        """
        self._guarded = True
        if self.runner is not None:
            for member in self.runner.members:
                member.tests_results = True

        def drop(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self.skipped_last_step:
                # The public way to make any torch optimizer skip a parameter, its momentum and step count included.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        optimizer.register_step_pre_hook(drop)

    def _begin_direct(self) -> None:
        """A step begins whose means go straight to the optimizer, dense."""
        self._direct_steps += 1
        self._went_direct = True

    def _inspect_direct(self, result: Tensor, step: int) -> None:
        """Look at a dense mean, where anybody skips a step that is not finite. It is the same on all ranks."""
        looks = self._guarded or self._protected or not self.direct
        if looks and not all_finite(result):
            with self._lock:
                first = self._direct_void != step
                self._direct_skipped += first
                self._direct_void = step
            if first:
                self._recorder.event(self.steps, "skipped", "a dense mean is not finite: the step is void")


def _counter(reference: weakref.ref[Wire]) -> Callable[[], int]:
    """How many steps a wire has done. Whoever counts must not keep it alive."""

    def count() -> int:
        wire = reference()
        return wire.steps if wire is not None else 0

    return count


def _leave(runner: Runner, seat: Seat) -> None:
    runner.stop()
    seat.close()
