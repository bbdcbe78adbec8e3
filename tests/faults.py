"""Training under a GradScaler while gradients turn into Inf or NaN on random ranks:

    python -m tests.faults --steps 1000

At 5 % of the steps one value of one gradient on one rank is replaced. Replicas must stay equal, residuals finite, and the
final loss within noise of a run without faults that leaves the same steps out; noise is what other batches change.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from tests.engine.test_nonfinite import Bad, Spoiler, residuals
from tests.models import batch, digest, wrapped
from tests.ranks import run

RANKS = 3
SHARE = 0.05
CODECS = ("micro(density=0.05)", "topk(density=0.05)", "adacomp", "randomblock(ratio=8)")
PARAMETERS = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")


def events(steps: int, seed: int) -> dict[int, Bad]:
    dice = random.Random(seed)
    return {
        step: Bad(
            dice.choice(PARAMETERS),
            dice.choice((float("nan"), float("inf"), -float("inf"))),
            (dice.randrange(RANKS),),
        )
        for step in range(steps)
        if dice.random() < SHARE
    }


def job(codec: str, steps: int, faults: dict[int, Bad], left_out: set[int], seed: int) -> tuple[str, float]:
    """Train; the digest of the model, and its loss on batches that nobody has seen."""
    ddp = wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
    wire = thinwire.attach(ddp, codec, scaler=scaler, min_elements=100)
    spoiler = Spoiler(ddp.module, faults)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scales = set()
    for step in range(steps):
        if step in left_out:
            continue
        spoiler.step = step
        inputs, targets = batch(100_000 * seed + step, dist.get_rank())
        optimizer.zero_grad()
        before = digest(ddp)
        scaler.scale(nn.functional.cross_entropy(ddp(inputs), targets)).backward()
        scaler.step(optimizer)
        scales.add(scaler.get_scale())
        scaler.update()
        assert wire.skipped_last_step == (step in faults) == (digest(ddp) == before), f"step {step}"
        if step % 50 in (0, 1) or step in faults:
            assert all(value.isfinite().all() for value in residuals(wire).values()), f"step {step}"
            everyone: list[str] = [""] * RANKS
            dist.all_gather_object(everyone, digest(ddp))
            assert len(set(everyone)) == 1, f"step {step}"
    assert wire.stats()["skipped"] == len(faults)
    assert not faults or len(scales) > 2, "the scale has moved"
    with torch.no_grad():
        unseen = [batch(10_000_000 + number, 0) for number in range(64)]
        loss = sum(float(nn.functional.cross_entropy(ddp.module(inputs), targets)) for inputs, targets in unseen) / 64
    return digest(ddp), loss


def compare(codec: str, steps: int, seeds: int = 4) -> dict[str, float]:
    """Run with faults, and without: the losses, and how far they are apart in units of the noise."""
    faults = events(steps, 1)

    def once(seed: int, bad: dict[int, Bad], left_out: set[int]) -> tuple[str, float]:
        results = run(RANKS, job, codec, steps, bad, left_out, seed)
        assert len({bits for bits, _ in results}) == 1, "replicas are equal"
        return results[0]

    bits, loss = once(0, faults, set())
    others = [once(seed, {}, set(faults)) for seed in range(seeds)]
    losses = [other for _, other in others]
    middle = sum(losses) / seeds
    noise = (sum((other - middle) ** 2 for other in losses) / (seeds - 1)) ** 0.5
    return {
        "faults": len(faults),
        "loss": loss,
        "without": losses[0],
        "noise": noise,
        "apart": abs(loss - losses[0]) / noise,
        "same_bits": float(bits == others[0][0]),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--codecs", nargs="*", default=CODECS)
    given = options.parse_args()
    for codec in given.codecs:
        found = compare(codec, given.steps)
        print(codec, {key: round(value, 5) for key, value in found.items()}, flush=True)
        assert found["apart"] < 3.0, codec


if __name__ == "__main__":
    main()
