"""Writes and reads the text and the tensors of saved states: what cannot be read is a `StateError` that names its key."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, TypeVar

import msgspec
import torch
from torch import Tensor

from ..errors import StateError
from ..version import __version__

State = Mapping[str, Any]


class Versioned(Protocol):
    """The text of a state, decoded: a msgspec struct that says which format it has."""

    @property
    def format(self) -> int: ...


T = TypeVar("T", bound=Versioned)


def encode(meta: msgspec.Struct) -> str:
    """The JSON text of a struct."""
    return msgspec.json.encode(meta).decode()


def decode(state: State, key: str, kind: type[T], expected_format: int) -> T:
    """The JSON text under `key`, as a struct of this type and format."""
    try:
        meta = msgspec.json.decode(state[key], type=kind)
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as error:
        raise StateError(f"{key!r} cannot be read: {error}") from error
    if meta.format != expected_format:
        raise StateError(f"the state has format {meta.format}; version {__version__} reads format {expected_format}")
    return meta


def tensor_of(state: State, key: str, like: Tensor) -> Tensor:
    """The tensor under `key`, if it can be copied to `like`: same shape, dtype and layout, and every value finite."""
    saved = state.get(key)
    if not _is_like(saved, like):
        found = "missing" if saved is None else _describe(saved)
        raise StateError(f"{key!r} should be {dtype_of(like)} {tuple(like.shape)}, but is {found}")
    if not bool(torch.isfinite(saved).all()):
        raise StateError(f"{key!r} holds a value that is not finite")
    return saved


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype as states write it: float32, int64."""
    return str(tensor.dtype).removeprefix("torch.")


def _is_like(saved: Any, tensor: Tensor) -> TypeGuard[Tensor]:
    return (
        isinstance(saved, Tensor)
        and (saved.shape, saved.dtype, saved.layout) == (tensor.shape, tensor.dtype, tensor.layout)
        and not saved.is_meta
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    odd = " sparse" if value.layout != torch.strided else " without data" if value.is_meta else ""
    return f"{dtype_of(value)}{odd} {tuple(value.shape)}"
