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
    parse,
    register,
)
from .engine.exchange import Exchange
from .engine.wire import Wire
from .errors import ThinwireError
from .feedback import Detached, Plain
from .frontends.ddp import attach
from .frontends.updates import LocalUpdates
from .schemes.world import LocalWorld
from .version import __version__

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
    "RandomBlock",
    "RandomK",
    "SIDCo",
    "Sign",
    "ThinwireError",
    "TopK",
    "Wire",
    "__version__",
    "attach",
    "parse",
    "register",
]
