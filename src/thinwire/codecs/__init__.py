"""Gradient compressors, one per file. `base.py` is their interface, `registry.py` their names and text form."""

from .adacomp import AdaComp
from .base import Codec, CodecState, Estimate, Gather, GatheredCodec, GroupInfo, Message, ParameterInfo, Sum
from .cast import Cast
from .dense import Dense
from .dgc import DGC
from .int8 import Int8
from .laplace import LaplaceTopK
from .lowrank import LowRank
from .micro import MiCRO
from .randomblock import RandomBlock
from .randomk import RandomK
from .registry import CODECS, parse, register
from .schedule import Warmup
from .sidco import SIDCo
from .sign import Sign
from .topk import TopK

__all__ = [
    "CODECS",
    "DGC",
    "AdaComp",
    "Cast",
    "Codec",
    "CodecState",
    "Dense",
    "Estimate",
    "Gather",
    "GatheredCodec",
    "GroupInfo",
    "Int8",
    "LaplaceTopK",
    "LowRank",
    "Message",
    "MiCRO",
    "ParameterInfo",
    "RandomBlock",
    "RandomK",
    "SIDCo",
    "Sign",
    "Sum",
    "TopK",
    "Warmup",
    "parse",
    "register",
]
