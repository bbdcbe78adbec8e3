"""thinwire: train PyTorch models fast over slow networks."""

from .codecs import Cast, Codec, Dense, TopK, parse, register
from .engine.exchange import Exchange
from .engine.wire import Wire
from .errors import ThinwireError
from .frontends.ddp import attach
from .schemes.world import LocalWorld
from .version import __version__

__all__ = [
    "Cast",
    "Codec",
    "Dense",
    "Exchange",
    "LocalWorld",
    "ThinwireError",
    "TopK",
    "Wire",
    "__version__",
    "attach",
    "parse",
    "register",
]
