"""Which tensors are compressed, and what `attach` says about it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.ddp.reference import Ledger, distance, mean_gradients
from tests.models import digest, mlp, train, wrapped
from tests.ranks import run

WEIGHTS = ["0.weight", "2.weight", "4.weight"]  # 3072, 6144, 640 elements
BIASES = ["0.bias", "2.bias", "4.bias"]  # 96, 64, 10 elements


def _compressed(options: dict[str, Any]) -> tuple[list[str], float, str]:
    """Names with a residual, how far the others are from the mean, and the parameters at the end."""
    model = mlp()
    ddp = wrapped(model)
    wire = thinwire.attach(ddp, "topk(density=0.02)", **options)
    ledger = Ledger(ddp)
    worst = 0.0

    def compare(step: int) -> None:
        nonlocal worst
        ledger.close_step()
        names = {key.split(".residual.")[1] for key in wire.state_dict() if ".residual." in key}
        dense = [i for i, (name, _) in enumerate(model.named_parameters()) if name not in names]
        expected = mean_gradients(model, dist.get_world_size(), [step])
        found = [p.grad for p in model.parameters()]
        if dense:
            worst = max(worst, distance([found[i] for i in dense], [expected[i] for i in dense]))

    train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(6), each=compare)
    assert ledger.balance(wire) <= 1e-6
    return sorted(key.split(".residual.")[1] for key in wire.state_dict() if ".residual." in key), worst, digest(ddp)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["0.weight", "2.weight"]),
        ({"min_elements": 3073}, ["2.weight"]),
        ({"min_elements": 3072}, ["0.weight", "2.weight"]),
        ({"min_elements": 10**9}, []),
        ({"min_elements": 0}, sorted(WEIGHTS + BIASES)),
        ({"min_elements": 0, "exclude": ["*.bias"]}, WEIGHTS),
        ({"min_elements": 0, "exclude": "*.bias"}, WEIGHTS),
        ({"min_elements": 100, "exclude": ["2.*"]}, ["0.weight", "4.weight"]),
        ({"min_elements": 0, "exclude": ["0.weight", "4.bias"]}, ["0.bias", "2.bias", "2.weight", "4.weight"]),
        ({"min_elements": 0, "exclude": ["*"]}, []),
    ],
    ids=str,
)
def test_what_is_compressed(options: dict[str, Any], names: list[str]) -> None:
    results = run(2, _compressed, options)
    assert results[0] == results[1]
    found, worst, _ = results[0]
    assert found == names
    assert worst <= 1e-6, "what is not compressed is the plain mean"


def _excluded_by_function() -> list[str]:
    ddp = wrapped()
    wire = thinwire.attach(ddp, "topk(density=0.02)", exclude=lambda name: name.startswith("0."), min_elements=0)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(4))
    return sorted(key.split(".residual.")[1] for key in wire.state_dict() if ".residual." in key)


def test_exclude_by_a_function() -> None:
    assert run(2, _excluded_by_function)[0] == ["2.bias", "2.weight", "4.bias", "4.weight"]


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def _said() -> list[tuple[int, str]]:
    heard = _Heard()
    logger = logging.getLogger("thinwire")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        ddp = wrapped()
        thinwire.attach(ddp, "topk(density=0.02)", min_elements=1000)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(4))
    finally:
        logger.removeHandler(heard)
    return [(record.levelno, record.getMessage()) for record in heard.records]


def test_rank_0_says_once_what_is_compressed() -> None:
    first, other = run(2, _said)
    assert other == []
    (_, attached), (_, frozen) = first
    assert "topk(density=0.02) on 2 ranks: compresses 9216 of 10026 parameters (91.9 %)" in attached
    assert "residuals add 3.7 bytes per parameter" in attached
    assert "2 dense steps" in frozen


def test_one_rank_alone_is_warned() -> None:
    levels = [level for level, text in run(1, _said)[0] if "world size is 1" in text]
    assert levels == [logging.WARNING]
