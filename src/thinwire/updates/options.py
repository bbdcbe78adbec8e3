"""The options of an optimizer's parameter groups in a checkpoint: what is saved, whether it fits, how it is set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..ranges import Finite, Whole

Value = bool | Whole | Finite | str | None | list[Finite]


def save(group: Mapping[str, Any]) -> dict[str, Value]:
    """The options of a group, as JSON has them."""
    result: dict[str, Value] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, tuple) and all(isinstance(item, int | float) for item in value):
            value = list(value)
        if key != "params" and (value is None or isinstance(value, bool | int | float | str | list)):
            result[key] = value
    return result


def load(group: dict[str, Any], options: Mapping[str, Value]) -> None:
    """Set the options of a group; `refuses` has found nothing."""
    for key, value in options.items():
        present = group.get(key)
        if value is None and isinstance(present, float):
            continue  # an infinity, see `_can_replace`
        if isinstance(present, Tensor) and isinstance(value, int | float):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) else value


def refuses(optimizer: Optimizer, index: int, options: Mapping[str, Value]) -> str | None:
    """Why an optimizer cannot continue with these options in place of its own."""
    group = optimizer.param_groups[index]
    for name, value in options.items():
        if not _can_replace(group.get(name), value):
            return f"{name} is {value!r:.60}, here {group[name]!r:.60}"
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    # Torch's optimizers check their arguments; not the learning rate, which schedulers may have set to anything.
    names = [name for name in options if name in optimizer.defaults and name in group and name != "lr"]

    def problem(of: Mapping[str, Any]) -> str | None:
        given: dict[str, Any] = {name: tuple(v) if isinstance(v := of[name], list) else v for name in names}
        try:
            type(optimizer)([torch.zeros(1, device=p.device) for p in group["params"][:1]], **given)
        except (ValueError, TypeError, RuntimeError) as error:
            return f"{', '.join(f'{name} {value!r:.40}' for name, value in given.items())}: {error}"
        return None

    return None if problem(group) else problem(options)


def _can_replace(present: Any, saved: Value) -> bool:
    """Whether a saved value fits an option: a number a number, a pair a pair."""
    if present is None:
        return True
    if isinstance(present, bool):
        return saved in (None, 0, 1)
    if isinstance(present, int | float | Tensor):
        if saved is None:  # how JSON has an infinity
            return isinstance(present, float) and not math.isfinite(present)
        if not isinstance(saved, int | float) or (isinstance(saved, bool) and not isinstance(present, int)):
            return False
        return saved == present or abs(saved) <= torch.finfo(torch.float32).max
    if isinstance(present, tuple | list):
        return isinstance(saved, list) and len(saved) == len(present)
    return saved is None or isinstance(present, str) == isinstance(saved, str)
