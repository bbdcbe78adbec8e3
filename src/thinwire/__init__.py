"""thinwire: train PyTorch models fast over slow networks."""

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
from .engine.exchange import Exchange
from .engine.wire import Wire
from .errors import ThinwireError
from .feedback import Detached, Plain
from .frontends.attach import attach
from .frontends.updates import LocalUpdates
from .frontends.wrap import wrap
from .planner.plan import Plan
from .schemes.world import LocalWorld
from .version import __version__


def set_threads(count: int) -> None:
    """Let `count` threads share thinwire's passes over memory; 1 unless THINWIRE_THREADS says otherwise."""
    from .kernels.cpu import sliced

    sliced.set_threads(count)


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
