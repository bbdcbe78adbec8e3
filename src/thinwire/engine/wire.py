"""Facade of one exchange, as users hold it: change it, read its numbers, save and load it, guard an optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..codecs import Codec
from ..comm import object_collectives
from ..comm.world import TorchWorld, World
from ..errors import AttachError, ExchangeError
from ..log import logger
from ..planner.plan import Plan
from . import files, fits
from .checkpoint import Checkpointer, Form
from .ddp_module import skip_void_steps
from .executor import Executor
from .session import Session
from .sinks import make_sink
from .strategy import Strategy


class Wire:
    """Base of `Exchange` and of what `attach` returns."""

    def __init__(self, session: Session, *, adopts_saved_plans: bool = False) -> None:
        self.session, self.tensors = session, list(session.job.tensors)
        self._checkpointer = Checkpointer(session, adopts=adopts_saved_plans)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        return self.session.world

    @property
    def strategy(self) -> Strategy:
        """By which codecs and chains its tensors travel."""
        return self.session.strategy

    @property
    def executor(self) -> Executor | None:
        """What exchanges by the layout; None until the layout is frozen."""
        return self.session.executor

    @property
    def plan(self) -> Plan | None:
        """The plan that it follows, if there is one."""
        return self.session.strategy.plan

    @property
    def steps(self) -> int:
        """Steps since training began, those before a resume included."""
        return self.session.steps

    @property
    def dense_steps(self) -> int:
        """Those of them that were plain all-reduces, or DDP's own."""
        return self.session.progress.dense_steps

    @property
    def error(self) -> BaseException | None:
        """What closed this wire, if it is closed."""
        return self.session.lifecycle.error

    @property
    def skipped_last_step(self) -> bool:
        """Whether the last step was void on all ranks, because a gradient was not finite somewhere."""
        return self.session.skipped_last_step

    # -- running -------------------------------------------------------------------------------------------------------

    def change(self, codec: Codec | str | Plan, chain: str | None = None, *, keep: bool = True) -> None:
        """Go over to another codec, chain or plan, between two steps. A collective: every rank calls it alike.

        What was not sent yet is not lost: each rank folds what it holds into its residual, or into its next gradient
        where the new chain has no residual for whole gradients; unless `keep` is false. What the codec had learnt is forgotten.
        """
        self.session.change(codec, chain, keep=keep)

    def set(self, **settings: float) -> None:
        """Change numbers of the codec from the next step on, as in `wire.set(density=0.001)`.

        A collective, to be called on every rank between two steps: all must say the same. It takes the place of a schedule,
        and is saved with the state.
        """
        session = self.session
        problem: str | None = None
        try:
            for name in settings:
                if name not in session.strategy.adjustable:
                    known = ", ".join(session.strategy.adjustable) or "nothing"
                    raise ValueError(f"{session.strategy} cannot change {name!r} while training; it can: {known}")
            session.strategy.at(0, settings)
            if session.waiting:
                raise ValueError("an exchange is under way: change the codec between two steps")
        except (TypeError, ValueError) as error:
            problem = str(error)
        agreed = session.agree({"settings": sorted(settings.items()), "step": session.step}, problem)
        if not agreed and problem is not None:
            raise AttachError(problem)
        session.settings |= settings
        for rank_state in session.executor.rank_states if session.executor is not None else ():
            rank_state.adjust(settings)
        now = session.strategy_now()
        session.recorder.event(session.steps, "settings", f"from the next step on {now.full}")
        if session.world.local_ranks[0] == 0:
            logger.info("from the next step on: %s", now)

    def close(self) -> None:
        """End the exchange thread and give up the process groups of this wire. The job cannot go on with it."""
        self.session.close()

    # -- numbers -------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Numbers of this rank, means over steps: seconds by phase, density, residual norm, and bytes.

        `bytes_per_step` are handed over to collectives, `link_bytes_per_step` is what these put on the rank's link: the
        number to compare codecs by.
        """
        session, executor = self.session, self.session.executor
        stats: dict[str, Any] = {
            "codec": str(session.strategy_now()),
            "chain": session.strategy.chain,
            "world": session.world.size,
            "dense_steps": session.progress.dense_steps,
        }
        if executor is None:
            empty = {"bytes_per_step": 0.0, "link_bytes_per_step": 0.0, "groups": []}
            return {**stats, "steps": 0, "skipped": session.direct.skipped, **empty}
        rank_state = executor.rank_states[0]
        numbers = executor.statistics.to_dict()
        for group, run in zip(numbers["groups"], rank_state.groups, strict=True):
            group |= fits.columns(run)
        return {
            **stats,
            "rank": rank_state.rank,
            **numbers,
            "skipped": executor.statistics.skipped + session.direct.skipped,
            "residual_norm": rank_state.residuals.norm(),
            "memory_bytes": rank_state.bytes,
        }

    def stats_of_all_ranks(self) -> list[dict[str, Any]]:
        """`stats()` of every rank, in rank order. A collective. The rank with the least `wire_seconds` is the straggler."""
        if not isinstance(self.world, TorchWorld):
            return [self.stats()]
        return object_collectives.gather(self.stats(), self.world.parent)

    def log_to(self, target: Any = None, *, every: int = 1, summary: int = 100, residual_every: int = 50) -> None:
        """Write down what every step takes and sends, from the next one on. Not a collective; may be called several times.

        target          a path ending in .jsonl: JSON lines of rank 0; another path: a folder, with a file of each rank.
                        An object with `add_scalar` (TensorBoard's SummaryWriter): scalars of rank 0. A function: is given
                        each line as a dict, in the exchange thread. None: only the summary
        every           write every so many steps
        summary         log the time per step on rank 0, every so many steps; 0: never
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
        recorder = self.session.recorder
        sink = None if target is None else make_sink(target, self.world.local_ranks[0])
        recorder.every, recorder.summary_every, recorder.residual_every = every, summary, residual_every
        recorder.active = True
        if sink is not None:
            recorder.add(sink, self.strategy.full)
            self.session.record_layout()

    def note(self, *, step: int | None = None, **values: float) -> None:
        """Add your own numbers to the log, such as `wire.note(loss=loss.item())` after backward."""
        self.session.recorder.note(self.steps if step is None else step, values)

    def trace(self, steps: int = 20) -> None:
        """Write down when every piece of the next steps happens: for `thinwire report --trace`, and its timeline.

        Spans go where `log_to` writes, step by step, and are not kept in memory.
        """
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps must be a whole number from 1 on, not {steps!r}")
        if not self.session.recorder.active:
            raise ExchangeError("a trace is written to the log: call wire.log_to(...) first")
        self.session.recorder.trace(steps)

    # -- mixed precision and non-finite values -------------------------------------------------------------------------

    def scaled_by(self, scaler: GradScaler) -> None:
        """Gradients are multiplied by this scaler's scale. A collective, to be called on every rank before a step.

        The same as `attach(..., scaler=scaler)`, for a scaler that is made later: residuals are then kept unscaled, and are
        as before, bit for bit, after a step that the scaler skips.
        """
        session, problem = self.session, None
        if not isinstance(scaler, GradScaler):
            problem = f"scaled_by needs a torch.amp.GradScaler, not {type(scaler).__name__}"
        elif session.waiting:
            problem = "an exchange is under way: name the scaler between two steps"
        agreed = session.agree({"scaler": problem is None and scaler.is_enabled()}, problem)
        if not agreed and problem is not None:
            raise AttachError(problem)
        if not scaler.is_enabled():
            return  # it does not skip a step that is not finite
        session.take_scaler(scaler)

    def guard(self, optimizer: Optimizer) -> None:
        """Make `optimizer.step()` do nothing, on all ranks, after a step in which a gradient was not finite.

        For jobs without a GradScaler. The gradients of such a step are dropped; see `docs/message-format.md` for how
        ranks agree. Schedulers and counters of your own still advance.
        """
        self.session.guard()
        skip_void_steps(optimizer, self)

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace one tensor of each rank in this process by its plain mean, outside of any step. Every rank calls it alike."""
        self.session.average_(tensors)

    # -- saved states --------------------------------------------------------------------------------------------------

    def state_dict(self, form: Form = "exact") -> dict[str, Any]:
        """Residuals, what codecs remember, step and layout.

        "exact"  of this rank, for as many ranks and the same bits. Local, never a collective; every rank saves its own
        "mean"   the same on all ranks, for any number of them: one residual in all, their mean. **A collective**: every rank
                 calls it, between two steps; one may save it, all must load it
        """
        return self._checkpointer.state_dict(form)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where `state_dict()` was taken. Local; refuses what does not fit, changing nothing.

        The state of this rank gives the same bits as a job that was never interrupted. If the number of ranks has changed, give
        a list with the states of all old ranks, or one of form "mean": every rank then goes on with the mean of what the old
        ones had not sent. Another codec or chain keeps the residuals and learns from scratch. All ranks must load alike.
        """
        self._checkpointer.load_state_dict(saved)

    def save(self, folder: files.Where, form: Form = "exact") -> None:
        """Write `state_dict(form)` as safetensors files: one per rank, or one in all, each whole or not at all.

        Every rank calls it. With "exact" it is no collective, and rank 1 of 2 writes `folder/rank1-of-2.safetensors`. With
        "mean" it is one, and rank 0 writes `folder/mean.safetensors`.
        """
        self._checkpointer.save(folder, form)

    def load(self, where: files.Where | Sequence[files.Where], *, key: str | None = None) -> None:
        """Resume from files of `save`: a folder, a file, or several; see `load_state_dict`.

        **A collective**: all ranks load, from the same step, or none does.
        In a folder the newest complete set counts, those for this number of ranks before others. The folder may also be one of
        `torch.distributed.checkpoint`, of any number of ranks; `key` says where in it, if it has several wires.
        """
        self._checkpointer.load(where, key=key)
