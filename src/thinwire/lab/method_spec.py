"""Parses local updates as a benchmark method: `updates(CODEC, STRENGTH, period=STEPS)`."""

import ast
from dataclasses import dataclass
from typing import Any

from ..codecs import parse
from ..errors import ThinwireError
from ..feedback import Detached
from .netns import LabError

EXAMPLE = "updates(randomblock(ratio=64), 0.3, period=8)"


@dataclass(frozen=True)
class UpdatesSpec:
    """Arguments of `LocalUpdates`."""

    codec: str
    feedback: Detached
    period: int = 1


def parse_updates(text: str) -> UpdatesSpec | None:
    """`"updates(randomblock(ratio=64), 0.3, period=8)"`; None for any other method.

    The strength may be `'auto'`; it defaults to 0.3. Nothing in the text is executed.
    """
    if not text.lstrip().startswith("updates"):
        return None
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "updates"):
            raise ValueError("expected updates(...)")
        if not 1 <= len(call.args) <= 2:
            raise ValueError("expected a codec and a strength")
        options: dict[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        strength = ast.literal_eval(call.args[1]) if len(call.args) == 2 else options.pop("strength", 0.3)
        period = options.pop("period", 1)
        if options:
            raise ValueError(f"there is no option {next(iter(options))!r}")
        if not (isinstance(period, int) and period >= 1):
            raise ValueError(f"the period must be a whole number of steps, not {period!r}")
        codec = ast.unparse(call.args[0])
        parse(codec)
        return UpdatesSpec(codec, Detached(strength), period)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, ThinwireError) as error:
        raise LabError(f"{text!r} is not understood, write it as {EXAMPLE!r}: {error}") from None
