"""What is sent: one file a compressor. `base.py` is the contract, `registry.py` their names and text form."""

from .base import Codec, CodecState, Estimate, Gather, GatheredCodec, GroupInfo, Message, ParameterInfo, Sum
from .cast import Cast
from .dense import Dense
from .registry import CODECS, parse, register
from .topk import TopK

__all__ = [
    "CODECS",
    "Cast",
    "Codec",
    "CodecState",
    "Dense",
    "Estimate",
    "Gather",
    "GatheredCodec",
    "GroupInfo",
    "Message",
    "ParameterInfo",
    "Sum",
    "TopK",
    "parse",
    "register",
]
