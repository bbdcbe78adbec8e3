"""thinwire: train PyTorch models fast over slow networks.

Names are loaded on first use: `import thinwire` alone loads neither torch nor Numba, and the command line starts at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import moved
from .version import __version__

if TYPE_CHECKING:
    from .codecs import (
        DGC,
        AdaComp,
        Cast,
        Codec,
        Dense,
        Int8,
        LaplaceTopK,
        LowRank,
        MiCRO,
        RandomBlock,
        RandomK,
        SIDCo,
        Sign,
        TopK,
        Warmup,
        parse,
        register,
    )
    from .comm.world import LocalWorld
    from .ddp.attach import attach
    from .ddp.wrap import wrap
    from .engine.exchange import Exchange
    from .engine.wire import Wire
    from .errors import ThinwireError
    from .feedback import Detached, Plain
    from .kernels.cpu.sliced import set_threads
    from .planner.plan import Plan
    from .updates import LocalUpdates

moved.install()

_HOME = {
    "attach": "ddp.attach",
    "wrap": "ddp.wrap",
    "Exchange": "engine.exchange",
    "Wire": "engine.wire",
    "LocalUpdates": "updates",
    "LocalWorld": "comm.world",
    "Plan": "planner.plan",
    "ThinwireError": "errors",
    "Detached": "feedback",
    "Plain": "feedback",
    "set_threads": "kernels.cpu.sliced",
}
"""Where a public name lives; all others are codecs."""

__all__ = [
    "DGC",
    "AdaComp",
    "Cast",
    "Codec",
    "Dense",
    "Detached",
    "Exchange",
    "Int8",
    "LaplaceTopK",
    "LocalUpdates",
    "LocalWorld",
    "LowRank",
    "MiCRO",
    "Plain",
    "Plan",
    "RandomBlock",
    "RandomK",
    "SIDCo",
    "Sign",
    "ThinwireError",
    "TopK",
    "Warmup",
    "Wire",
    "__version__",
    "attach",
    "parse",
    "register",
    "set_threads",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module(f".{_HOME.get(name, 'codecs')}", __name__), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ROOMS = ("codecs", "engine", "errors", "feedback", "kernels", "messages", "planner")
"""Packages that can be reached as attributes without a separate import."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
