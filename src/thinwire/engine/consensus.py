"""Consensus before a collective: every rank must give the same facts, or all of them raise."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ..comm import object_collectives
from ..errors import AttachError, StateError, ThinwireError
from ..version import __version__

T = TypeVar("T")


def agree(group: dist.ProcessGroup | None, facts: Mapping[str, Any], error: str | None = None) -> None:
    """Compare `facts` over all ranks, a collective; raise on every rank if one has an error or another opinion.

    A mismatch found later does not raise in gloo: it aborts the peer.
    """
    mine = (
        {"version": __version__, "world": dist.get_world_size(group), **facts} if error is None else {"error": error}
    )
    everyone = object_collectives.gather(mine, group)
    if error is not None:
        raise AttachError(error)
    for rank, theirs in enumerate(everyone):
        if not isinstance(theirs, dict):
            raise AttachError(f"rank {rank} says {theirs!r:.60} where facts were expected")
        if "error" in theirs:
            raise AttachError(f"rank {rank} refuses: {theirs['error']}")
    for rank, theirs in enumerate(everyone):
        for key in mine:
            if everyone[0].get(key) != theirs.get(key):
                problem = _difference(key, everyone[0].get(key), theirs.get(key), rank)
                raise AttachError(f"the ranks disagree: {problem}")


def load_alike(
    prepare: Callable[[], tuple[T, dict[str, Any]]], agree: Callable[[dict[str, Any], str | None], object]
) -> T:
    """What all ranks load: `prepare` reads it and gives the facts that must be equal, `agree` compares them.

    Raises `StateError` on every rank if one of them cannot read its state, or has another one.
    """
    facts: dict[str, Any] = {}
    problem: StateError | None = None
    try:
        found, facts = prepare()
    except StateError as error:  # the other ranks wait to hear of it
        problem = error
    try:
        agree(facts, None if problem is None else str(problem))
    except AttachError as error:
        raise problem or StateError(str(error)) from None
    if problem is not None:
        raise problem
    return found


def _difference(key: str, first: Any, other: Any, rank: int) -> str:
    if isinstance(first, list) and isinstance(other, list):
        for a, b in zip(first, other, strict=False):
            if a != b:
                return f"{key}: rank 0 has {_show(a)}, rank {rank} has {_show(b)}"
        return f"{key}: rank 0 has {len(first)}, rank {rank} has {len(other)}"
    return f"{key}: rank 0 has {first!r}, rank {rank} has {other!r}"


def _show(value: Any) -> str:
    return ", ".join(f"{key} {part!r}" for key, part in value.items()) if isinstance(value, dict) else str(value)


def problem_of(error: Exception) -> str:
    """What goes wrong on this rank, as one line for all of them."""
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"
