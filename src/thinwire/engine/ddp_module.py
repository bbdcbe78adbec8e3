"""Facts about a DistributedDataParallel module: its parameters, when its buckets are final, the wire attached to it."""

from __future__ import annotations

import traceback
import weakref
from typing import Any, Protocol

from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..errors import ExchangeError
from .strategy import Strategy

_strategies: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()


def attached(module: DistributedDataParallel) -> Strategy | None:
    """The strategy of the wire that is attached to a module, if there is one."""
    wire = _strategies.get(module)
    return None if wire is None else wire.strategy


def remember(module: DistributedDataParallel, wire: Any) -> None:
    """A wire was attached: `wire.strategy` says how it exchanges."""
    _strategies[module] = wire


def parameters_of(module: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP reduces, in its own order, without a `module.` in front of their names."""
    ignored = set(module.parameters_to_ignore)
    named = module.module.named_parameters()
    return {plain(name): p for name, p in named if p.requires_grad and name not in ignored}


def plain(name: str) -> str:
    """The name of a parameter as it was before `torch.compile`: patterns and checkpoints fit a model with and without."""
    return name.replace("_orig_mod.", "")


def steps_until_final(module: DistributedDataParallel) -> int:
    """After how many steps the buckets of DDP stay as they are.

    It rebuilds them once, after the first step (the second with static_graph), unless it searches for unused parameters.
    Counted in steps of the wire, because all ranks count the same, joined ones included.
    """
    if module._has_rebuilt_buckets or (module.find_unused_parameters and not module.static_graph):
        return 0
    return 2 if module.static_graph else 1


def check_join(module: DistributedDataParallel | None) -> None:
    if module is not None and module._join_config.enable and not module._divide_by_initial_world_size:
        raise ExchangeError(
            "join(divide_by_initial_world_size=False) is not possible with a communication hook, which DDP does not tell "
            "how many ranks have not joined: leave it at True"
        )


class Skipping(Protocol):
    @property
    def skipped_last_step(self) -> bool: ...


def skip_void_steps(optimizer: Optimizer, wire: Skipping) -> None:
    """Make `optimizer.step()` do nothing after a void step of a wire."""

    def drop(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if wire.skipped_last_step:
            # The public way to make any torch optimizer skip a parameter, its momentum and step count included.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    optimizer.register_step_pre_hook(drop)


def failed(error: Exception) -> Future[Tensor]:
    """What a hook returns for a bucket in place of raising, which would leave DDP in pieces."""
    future = Future[Any]()  # without devices: what it holds is no tensor
    future.set_result(error)
    told = future.then(unwrap)
    forget_frames(error)
    return told


def unwrap(future: Future[Any]) -> Tensor:
    """The bucket of a future; an error, which the future holds as a value, is raised with its traceback as text."""
    value = future.value()
    if isinstance(value, BaseException):
        # DDP hands only text from the exchange thread to backward.
        raise ExchangeError("".join(traceback.format_exception(value)).rstrip()) from value
    assert isinstance(value, Tensor)
    return value


def forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and of those it came from.

    DDP keeps the future of a failed bucket. With the tracebacks it would keep the caller's frames, and so itself, for ever.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
