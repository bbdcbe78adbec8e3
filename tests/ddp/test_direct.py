"""The dense path when it is interrupted: the wire is closed before backward comes back, and nothing waits for ever."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.models import train, wrapped
from tests.ranks import run
from thinwire.errors import ThinwireError


def _interrupted() -> None:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "dense")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    train(ddp, optimizer, range(4))
    path = wire.hook._dense
    flight = path._fly(torch.zeros(1))
    errors: list[BaseException | None] = []
    flight.future.add_done_callback(lambda _: errors.append(wire.error))
    wire.hook.interrupt()
    assert flight.future.done()
    assert str(errors[0]).startswith("interrupted"), (
        "the thread that trains could begin another step before it is closed"
    )
    assert path._fly(torch.zeros(1)).future.done(), "a bucket that was just being handed over is waited for, for ever"
    with pytest.raises((ThinwireError, RuntimeError), match="interrupted"):
        train(ddp, optimizer, range(4, 5))


def test_an_interrupted_wire_is_closed_before_backward_returns() -> None:
    run(2, _interrupted)
