"""Codec names and their text form: `"topk(density=0.01)"` for config files and command lines.

Adding a codec is one file and one line in `CODECS`.
"""

import ast
import dataclasses

from ..errors import CodecTextError
from ..suggest import suggest
from .adacomp import AdaComp
from .base import Codec
from .cast import Cast
from .dense import Dense
from .dgc import DGC
from .int8 import Int8
from .laplace import LaplaceTopK
from .lowrank import LowRank
from .micro import MiCRO
from .names import BY_NAME
from .randomblock import RandomBlock
from .randomk import RandomK
from .schedule import Warmup
from .sidco import SIDCo
from .sign import Sign
from .topk import TopK

CODECS: dict[str, type[Codec]] = BY_NAME

CODECS |= {
    "dense": Dense,
    "cast": Cast,
    "topk": TopK,
    "laplace": LaplaceTopK,
    "micro": MiCRO,
    "adacomp": AdaComp,
    "randomblock": RandomBlock,
    "randomk": RandomK,
    "dgc": DGC,
    "sidco": SIDCo,
    "int8": Int8,
    "sign": Sign,
    "lowrank": LowRank,
}


def register(name: str, codec: type[Codec]) -> None:
    """Register a custom codec under a name, so that texts, plans and checkpoints can refer to it."""
    if not name.isidentifier():
        raise ValueError(f"the name of a codec must be an identifier, not {name!r}")
    if CODECS.get(name, codec) is not codec:
        raise ValueError(f"the name {name!r} is taken by {CODECS[name].__name__}")
    CODECS[name] = codec


def parse(text: str) -> Codec:
    """`"topk(density=0.01)"` -> `TopK(density=0.01)`. Values are Python literals; nothing in the text is executed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodecTextError(
            f"{text!r} is not a codec: expected a name with arguments, as in 'topk(density=0.01)'"
        ) from error
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise CodecTextError(f"{text!r} is not a codec: expected a name with arguments, as in 'topk(density=0.01)'")
    kind = CODECS.get(call.func.id)
    if kind is None:
        raise CodecTextError(f"{text!r}: there is no codec {call.func.id!r}; {suggest(call.func.id, sorted(CODECS))}")
    # In the order of the constructor: keyword-only fields come last.
    names = [
        field.name for field in sorted(dataclasses.fields(kind), key=lambda field: field.kw_only is True) if field.init
    ]
    arguments: dict[str, object] = {}
    if len(call.args) > len(names):
        raise CodecTextError(f"{text!r}: {call.func.id} takes at most {len(names)} arguments: {', '.join(names)}")
    for name, value in [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise CodecTextError(f"{text!r}: {call.func.id} has no argument {name!r}; it has: {allowed}")
        if name in arguments:
            raise CodecTextError(f"{text!r}: argument {name!r} is given twice")
        if isinstance(value, ast.Call):
            arguments[name] = _schedule(text, name, value)
            continue
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
            raise CodecTextError(
                f"{text!r}: the value of {name!r} is not a number, a text or a truth value"
            ) from error
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise CodecTextError(f"{text!r}: {error}") from error


def _schedule(text: str, name: str, call: ast.Call) -> Warmup:
    """`Warmup(to=0.01, steps=500)` as the value of an argument."""
    if not (isinstance(call.func, ast.Name) and call.func.id in ("Warmup", "warmup")):
        raise CodecTextError(
            f"{text!r}: the value of {name!r} is not a number, a text, a truth value or Warmup(to, steps, start=0.25)"
        )
    try:
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return Warmup(*(ast.literal_eval(value) for value in call.args), **words)
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise CodecTextError(f"{text!r}: {error}") from error
