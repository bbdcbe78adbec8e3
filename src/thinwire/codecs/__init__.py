"""What is sent: one file a compressor. `base.py` is the contract, `registry.py` their names and text form."""

from .adacomp import AdaComp
from .base import Codec, CodecState, Estimate, Gather, GatheredCodec, GroupInfo, Message, ParameterInfo, Sum
from .cast import Cast
from .dense import Dense
from .laplace import LaplaceTopK
from .micro import MiCRO
from .randomblock import RandomBlock
from .registry import CODECS, parse, register
from .topk import TopK

__all__ = [
    "CODECS",
    "AdaComp",
    "Cast",
    "Codec",
    "CodecState",
    "Dense",
    "Estimate",
    "Gather",
    "GatheredCodec",
    "GroupInfo",
    "LaplaceTopK",
    "Message",
    "MiCRO",
    "ParameterInfo",
    "RandomBlock",
    "Sum",
    "TopK",
    "parse",
    "register",
]
