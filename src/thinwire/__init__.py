"""thinwire: train PyTorch models fast over slow networks."""

from .codecs import AdaComp, Cast, Codec, Dense, LaplaceTopK, MiCRO, RandomBlock, TopK, parse, register
from .engine.exchange import Exchange
from .engine.wire import Wire
from .errors import ThinwireError
from .frontends.ddp import attach
from .schemes.world import LocalWorld
from .version import __version__

__all__ = [
    "AdaComp",
    "Cast",
    "Codec",
    "Dense",
    "Exchange",
    "LaplaceTopK",
    "LocalWorld",
    "MiCRO",
    "RandomBlock",
    "ThinwireError",
    "TopK",
    "Wire",
    "__version__",
    "attach",
    "parse",
    "register",
]
