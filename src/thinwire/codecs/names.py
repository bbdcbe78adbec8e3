"""Names of registered codecs and the text of a codec; `registry.py` fills them in and reads texts."""

import dataclasses
from typing import Any

from ..errors import CodecTextError

BY_NAME: dict[str, type[Any]] = {}
"""Every codec by its name. Below the codecs, whose `str` needs it."""


def name_of(codec: Any) -> str:
    for name, kind in BY_NAME.items():
        if type(codec) is kind:
            return name
    raise CodecTextError(
        f"{type(codec).__name__} is not registered: thinwire.register({type(codec).__name__.lower()!r}, "
        f"{type(codec).__name__}) gives it a name for logs, plans and checkpoints"
    )


def to_text(codec: Any) -> str:
    """The text that `parse` turns back into an equal codec; arguments at their defaults are left out."""
    parts = [
        f"{field.name}={getattr(codec, field.name)!r}"
        for field in dataclasses.fields(codec)
        if getattr(codec, field.name) != field.default
    ]
    return f"{name_of(codec)}({', '.join(parts)})" if parts else name_of(codec)
