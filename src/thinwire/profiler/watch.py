"""Timings of training steps: forward, backward, when each gradient is ready, optimizer. The loop is not changed.

Ready times are taken on the clock of the thread that runs backward: it stands still while another thread has the core. What
DDP's own collectives still add to it is taken off afterwards; see `Compute.undisturbed`.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .links import Beside


@dataclass
class Step:
    """One step as it was seen. Seconds; `ready` since backward began, in the order of arrival."""

    forward: float = 0.0
    crowd: float = 1.0
    """How much longer the module's forward took than its thread worked."""
    ready: dict[str, float] = field(default_factory=dict)
    optimizer: float = 0.0
    wall: float = 0.0
    """From the start of forward to the end of the optimizer's step."""


@dataclass(frozen=True)
class Compute:
    """Medians over steps: what a step computes on this rank."""

    forward: float
    backward: float
    optimizer: float
    wall: float
    ready: dict[str, float]
    """In the order in which backward makes gradients ready."""
    crowd: float = 1.0
    """How many threads want each core, as far as a thread that does nothing but compute can tell."""
    steps: tuple[float, ...] = ()
    """What each step computed, from forward to optimizer: ranks wait for the slowest in every one of them."""
    unsteady: float = 0.0
    """How much the walls of the steps differ, see `unsteadiness`."""

    def undisturbed(
        self, sizes: Mapping[str, int], buckets: Sequence[int], seconds: Callable[[float], float], beside: Beside
    ) -> Compute:
        """The same without what collectives added to the clock of the thread: one for each bucket, when it was full.

        sizes and buckets in bytes; seconds: what a collective of so many bytes takes; beside: what it does to the thread.
        """
        ready: dict[str, float] = {}
        speed = 1.0 - min(beside.share, 0.95)
        shown = min(1.0, speed * beside.clock)
        clock = wall = progress = wire_free = 0.0
        filled, waiting = 0, list(buckets)
        for name, at in self.ready.items():
            while at - clock > 1e-9:
                busy = wire_free - wall > 1e-9
                passed = (at - clock) / (shown if busy else 1.0)
                if busy:
                    passed = min(passed, wire_free - wall)
                wall += passed
                clock += passed * (shown if busy else 1.0)
                progress += passed * (speed if busy else 1.0)
            ready[name] = progress
            filled += sizes.get(name, 0)
            while waiting and filled >= waiting[0]:
                filled -= waiting[0]
                wire_free = max(wire_free, wall) + seconds(waiting.pop(0))
        return replace(self, ready=ready, backward=max(ready.values(), default=0.0))


def unsteadiness(walls: Sequence[float]) -> float:
    """Twice the median distance of some seconds from their median, relative to it: one disturbed step does not count."""
    middle = statistics.median(walls)
    return 2.0 * statistics.median([abs(wall - middle) for wall in walls]) / middle if middle > 0.0 else 0.0


class Watch:
    """Hooks on a module that is trained data-parallel; `named` are the parameters that are exchanged.

    Passes without an exchange (`no_sync`) do not count. From the steps in `keep` copies of this rank's own gradients are kept,
    before they are averaged. The clocks are of the wall and of the thread that runs backward, in seconds.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        *,
        keep: range = range(0),
        on_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._thread_clock = clock, thread_clock
        self.steps: list[Step] = []
        self.gradients: list[dict[str, Tensor]] = []
        self._module = weakref.ref(module)
        self._keep, self._on_step = keep, on_step
        self._step: Step | None = None
        self._begun = self._worked = self._backward = self._optimizing = 0.0
        self._in_backward = False
        self._own = {id(parameter) for parameter in named.values()}
        # Those of the module go with it. Those of optimizers are torch's for the whole process: it must not keep this alive.
        everywhere = [
            register_optimizer_step_pre_hook(_weakly(self._optimizer_begins)),
            register_optimizer_step_post_hook(_weakly(self._optimizer_ends)),
        ]
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._forward_begins),
            module.register_forward_hook(self._forward_ends),
            *everywhere,
        ]
        weakref.finalize(self, _remove, everywhere)
        self._named = weakref.WeakValueDictionary(named)
        self._markers: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Look at every gradient, from the next step on, and remember all steps."""
        self.rest()
        self.steps.clear()
        for name, parameter in self._named.items():
            hook = parameter.register_post_accumulate_grad_hook(self._marker(name))  # type: ignore[no-untyped-call]
            self._markers.append(hook)

    def rest(self) -> None:
        """From now on look at whole steps only, and remember the last one."""
        for hook in self._markers:
            hook.remove()
        self._markers.clear()
        self.gradients.clear()

    def close(self) -> None:
        """Take all hooks away."""
        self.rest()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def compute(self, skip: int = 1) -> Compute:
        """Medians over the steps seen, without the first ones: they also build buffers."""
        steps = self.steps[min(skip, len(self.steps) - 1) :]
        if not steps or not steps[0].ready:
            raise ValueError("no step was seen yet")
        # Steps whose gradients are copied take longer than they would.
        plain = [step for place, step in enumerate(self.steps) if place >= skip and place not in self._keep] or steps
        names = [name for name in steps[-1].ready if all(name in step.ready for step in steps)]
        ready = {name: statistics.median(step.ready[name] for step in steps) for name in names}
        ready = dict(sorted(ready.items(), key=lambda item: item[1]))
        walls = [step.wall for step in plain]
        return Compute(
            forward=statistics.median(step.forward for step in steps),
            backward=max(ready.values()),
            optimizer=statistics.median(step.optimizer for step in steps),
            wall=statistics.median(walls),
            ready=ready,
            crowd=max(1.0, statistics.median(step.crowd for step in steps)),
            steps=tuple(step.forward + max(step.ready.values(), default=0.0) + step.optimizer for step in steps),
            unsteady=unsteadiness(walls),
        )

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and getattr(module, "require_backward_grad_sync", True):
            if self._step is not None and self._in_backward and not self._step.wall:
                self._step_ends(0.0)  # an optimizer that is not torch's
            self._step, self._begun, self._in_backward = Step(), self._clock(), False
            self._worked = self._thread_clock()

    def _forward_ends(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if self._step is not None:
            worked = self._thread_clock() - self._worked
            self._step.crowd = (self._clock() - self._begun) / max(worked, 1e-9)
            for tensor in tensors_of(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, gradient: Tensor) -> None:
        if self._step is not None and not self._in_backward:
            self._in_backward = True
            self._step.forward = self._clock() - self._begun
            self._backward = self._thread_clock()

    def _marker(self, name: str) -> Callable[[Tensor], None]:
        watching = weakref.ref(self)  # the garbage collector does not see what hooks of a tensor refer to

        def mark(parameter: Tensor) -> None:
            watch = watching()
            if watch is not None:
                watch._is_ready(name, parameter)

        return mark

    def _is_ready(self, name: str, parameter: Tensor) -> None:
        module = self._module()
        if self._step is None or module is None or not getattr(module, "require_backward_grad_sync", True):
            return
        if not self._in_backward:  # an output that has no hook
            self._backward_begins(parameter)
        self._step.ready[name] = self._thread_clock() - self._backward
        if len(self.steps) in self._keep and parameter.grad is not None:
            while len(self.gradients) <= len(self.steps) - self._keep.start:
                self.gradients.append({})
            before = self._thread_clock()
            self.gradients[-1][name] = parameter.grad.detach().clone()
            self._backward += self._thread_clock() - before

    def _optimizer_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizing = self._clock()

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        mine = any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])
        if mine and self._step is not None and self._in_backward and not self._step.wall:
            self._step_ends(self._clock() - self._optimizing)

    def _step_ends(self, optimizer: float) -> None:
        assert self._step is not None
        self._step.optimizer = optimizer
        self._step.wall = self._clock() - self._begun
        if not self._markers:
            self.steps.clear()
        self.steps.append(self._step)
        self._step = None
        self._on_step()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        target = reference()
        if target is not None:
            target(*arguments)

    return call


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name))
