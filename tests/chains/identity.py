"""Codecs that lose nothing, one with messages and one with sums: what a chain does to them is the chain's own doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from thinwire.codecs import Codec, CodecState, Estimate, GatheredCodec, GroupInfo, Message, Sum, register
from thinwire.codecs.base import Steps
from thinwire.messages import HEADER_BYTES, Flag, Header, IndexCoding, ValueCoding, read_header, write_header


@dataclass(frozen=True)
class Identity(GatheredCodec):
    """Everything, as float32."""

    def encode(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Message:
        finite = bool(torch.isfinite(gradient).all())
        if finite:
            residual += gradient
        size = 4 * residual.numel() if finite else 0
        buffer, flags = state.outgoing.numpy(), Flag(0) if finite else Flag.NONFINITE
        count = residual.numel() if finite else 0
        write_header(buffer, Header(IndexCoding.OPAQUE, ValueCoding.NONE, flags, count, HEADER_BYTES + size, size))
        if finite:
            buffer[HEADER_BYTES : HEADER_BYTES + size].view(np.float32)[:] = residual.numpy()
            residual.zero_()
        return Message(HEADER_BYTES + size)

    def decode(self, messages: Sequence[Tensor], out: Tensor, scale: float, state: CodecState) -> None:
        assert out.numel() == state.group.elements
        for message in messages:
            header = read_header(message.numpy())
            if header.entries:
                assert header.entries == out.numel()
                values = message.numpy()[HEADER_BYTES : HEADER_BYTES + header.payload].view(np.float32)
                out += torch.from_numpy(values * np.float32(scale))

    def smallest_capacity(self, group: GroupInfo) -> int:
        return HEADER_BYTES + 4 * group.elements

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(gathered=HEADER_BYTES + 4 * group.elements)


@dataclass(frozen=True)
class IdentitySum(Codec):
    """The same, added on its way."""

    keeps_residual: ClassVar[bool] = False

    def exchange(self, gradient: Tensor, residual: Tensor, state: CodecState) -> Steps:
        assert gradient.numel() == state.group.elements
        yield Sum(gradient, average=True)

    def estimate(self, group: GroupInfo, world: int) -> Estimate:
        return Estimate(summed=4 * group.elements)


register("identity", Identity)
register("identitysum", IdentitySum)
