"""A codec of one's own, in twenty lines: python examples/own_codec.py

It sends what is several times louder than the mean of its group, so that no density is to be chosen. Four ranks in one process
learn a regression with it and densely; on real ranks it is `thinwire.attach(ddp, "loud(times=2)")`. More: `docs/new-codec.md`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import thinwire
from thinwire.codecs.sparse import SparseCodec, SparseState


@dataclass(frozen=True)
class Loud(SparseCodec):
    """Every element whose magnitude is more than `times` the mean one."""

    times: float = 2.0

    def pick(
        self, gradient: Tensor, residual: Tensor, state: SparseState
    ) -> tuple[bool, NDArray[np.int32], NDArray[np.float32]]:
        from thinwire.kernels.cpu import basic  # compiled kernels are loaded when they are needed, not at import

        flat = residual.numpy()
        if not basic.accumulate(flat, gradient.numpy()):
            return False, np.empty(0, np.int32), np.empty(0, np.float32)
        loudness = np.abs(flat)
        indices = np.flatnonzero(loudness > self.times * loudness.mean()).astype(np.int32)
        values = flat[indices]
        flat[indices] = 0.0
        return True, indices, values


thinwire.register("loud", Loud)


def train(codec: str, ranks: int = 4, steps: int = 300) -> tuple[float, float]:
    """The loss of a linear regression at the end, and the bytes that a rank hands over in a step."""
    torch.manual_seed(0)
    truth = torch.randn(64, 64)
    weight = torch.zeros(64, 64)
    exchange = thinwire.Exchange({"weight": weight}, codec, thinwire.LocalWorld(ranks))
    loss = 0.0
    for _ in range(steps):
        gradients, loss = [], 0.0
        for _ in range(ranks):
            inputs = torch.randn(16, 64)
            error = inputs @ (weight - truth)
            gradients.append({"weight": inputs.T @ error / 16})
            loss += float(error.square().mean()) / ranks
        exchange.reduce_(gradients)
        weight -= 0.05 * gradients[0]["weight"]
    return loss, exchange.stats()["bytes_per_step"]


if __name__ == "__main__":
    for text in ("dense", "loud(times=2)", "loud(times=1.5)"):
        final, size = train(text)
        print(f"{text:14} loss {final:.5f}, {size:6.0f} bytes a step")
