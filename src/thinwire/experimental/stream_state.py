"""The saved state of a wire on a GPU: one rank's residuals by name, and a text that says what job they are of.

    rank0.stream               JSON of `Meta`
    rank0.residual.0.weight    float32, shaped like the parameter

Files are those of `engine.files`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from ..engine.state_schema import decode, encode, tensor_of
from ..errors import StateError
from ..ranges import Count, Rank, Version, World

FORMAT = 1


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which job, and how far. `partition`: the tensors that travel together; `compresses`: it has had its dense steps."""

    format: Version
    versions: dict[str, str]
    codec: str
    world: World
    rank: Rank
    tensors: dict[str, list[Count]]
    dtypes: dict[str, str]
    steps: Count
    dense_steps: Count
    compresses: bool
    partition: list[list[str]]


def write(meta: Meta, residuals: Mapping[str, Tensor]) -> dict[str, Any]:
    owner = f"rank{meta.rank}"
    copies = {f"{owner}.residual.{name}": residual.clone() for name, residual in residuals.items()}
    return {f"{owner}.stream": encode(meta), **copies}


def read(state: Mapping[str, Any], mine: Meta) -> Meta:
    """What a state says of itself, if it fits the job that `mine` describes; otherwise the first difference."""
    key = f"rank{mine.rank}.stream"
    if key not in state:
        others = sorted(
            key for key in state if isinstance(key, str) and key.endswith((".stream", ".thinwire", ".updates"))
        )
        raise StateError(
            f"there is no {key!r} in this state, of a wire on CUDA on this rank; it has: {', '.join(others) or 'none'}"
        )
    meta = decode(state, key, Meta, FORMAT)
    for field in ("codec", "world", "rank"):
        if getattr(meta, field) != getattr(mine, field):
            raise StateError(f"{field}: the state has {getattr(meta, field)!r}, this job has {getattr(mine, field)!r}")
    for field in ("tensors", "dtypes"):
        theirs, ours = getattr(meta, field), getattr(mine, field)
        for name in sorted({*theirs, *ours}):
            if theirs.get(name) != ours.get(name):
                was, now = theirs.get(name, "no such tensor"), ours.get(name, "no such tensor")
                raise StateError(f"{name!r}: the state has {was}, this model has {now}")
    together = sorted(name for names in meta.partition for name in names)
    if (meta.partition or meta.compresses) and together != sorted(mine.tensors):
        raise StateError("partition: the state does not have every tensor of this model once")
    for names in meta.partition:
        if not names or len({mine.dtypes[name] for name in names}) > 1:
            raise StateError(f"partition: {names} cannot travel together")
    return meta


def fill(residuals: Mapping[str, Tensor], state: Mapping[str, Any], meta: Meta) -> None:
    """Copy the residuals of a state that was `read` into these, which are not in use yet."""
    for name, residual in residuals.items():
        residual.copy_(tensor_of(state, f"rank{meta.rank}.residual.{name}", residual))
