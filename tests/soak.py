"""A job that is left on for long, in which everything goes wrong that can: `python tests/soak.py --steps 20000`.

Real ranks train a small model with DDP over gloo. At random a gradient is NaN, Inf, huge, zero or denormal on some rank;
the codec, its chain and its density change; the state is saved and loaded; with `--rates` the links of an emulated cluster
change their speed. All the time replicas must be equal bit for bit, nothing that was not sent may be lost, no residual may
be other than finite, and after step 1000 memory may not grow.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import thinwire  # noqa: E402
from tests.models import batch, digest, mlp, wrapped  # noqa: E402

CODECS = [
    "topk(density=0.05)",
    "topk(density=0.05, values='fp16')",
    "topk(density=0.05) via K",
    "topk(density=0.05) via B",
    "micro(density=0.05)",
    "micro(density=0.05, values='bf16', balance=True)",
    "adacomp",
    "laplace(density=0.05)",
    "sidco(density=0.05)",
    "dgc(density=0.05)",
    "randomblock(ratio=8)",
    "randomk(density=0.1)",
    "lowrank(rank=2)",
    "int8",
    "int8 via J",
    "sign",
    "cast(dtype='bf16')",
    "dense",
]
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda g: g * float("nan"),
    "one NaN": lambda g: g.flatten().index_fill(0, torch.tensor([g.numel() - 1]), float("nan")).view(g.shape),
    "Inf": lambda g: g + float("inf"),
    "huge": lambda g: g * 1e30,
    "zero": lambda g: g * 0.0,
    "denormal": lambda g: g * 1e-40,
}
SETTLED = 1000  # steps after which memory must not grow: everything that is made once was made
ALLOWED = 1e-5  # of a mean, in shares of the magnitudes that were added


class Soak:
    """One rank."""

    def __init__(self, seed: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.common, self.own = random.Random(seed), random.Random(1000 + seed * self.world + self.rank)
        self.model = mlp()
        self.ddp = wrapped(self.model)
        self.wire = thinwire.attach(self.ddp, CODECS[0], min_elements=100)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        self.wire.guard(self.optimizer)
        self.fault: tuple[int, str] | None = None
        self.given: dict[str, Tensor] = {}
        self.named = dict(self.model.named_parameters())
        self.hooks = [
            hook
            for place, (name, parameter) in enumerate(self.named.items())
            for hook in (
                parameter.register_hook(self._spoiler(place)),
                parameter.register_post_accumulate_grad_hook(self._booker(name)),
            )
        ]
        self.turn = 0
        self.counts = dict.fromkeys(["faults", "void", "changes", "refused", "settings", "resumes", "checks"], 0)
        self.codecs: set[str] = set()

    def _spoiler(self, place: int) -> Callable[[Tensor], Tensor]:
        def spoil(gradient: Tensor) -> Tensor:
            return FAULTS[self.fault[1]](gradient) if self.fault is not None and self.fault[0] == place else gradient

        return spoil

    def _booker(self, name: str) -> Callable[[Tensor], None]:
        def book(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.given[name] = parameter.grad.clone()

        return book

    def step(self, step: int) -> None:
        self._adjust(step)
        self.fault = None
        if self.own.random() < 0.05:
            self.fault = (self.own.randrange(len(self.named)), self.own.choice(list(FAULTS)))
            self.counts["faults"] += 1
        looks = step % 5 == 0 or self.common.random() < 0.1
        before = self._left() if looks else {}
        inputs, targets = batch(step, self.rank)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.ddp(inputs), targets).backward()
        void = self.wire.skipped_last_step
        self.counts["void"] += void
        if looks:
            self._check(step, before, void)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _adjust(self, step: int) -> None:
        """What all ranks do alike between two steps. In the beginning every codec has its turn."""
        if step < 10:
            return
        if (step % 25 == 0 and step <= SETTLED) or self.common.random() < 0.01:
            text = self.common.choice(CODECS) if step > SETTLED else CODECS[self.turn % len(CODECS)]
            self.turn += 1
            try:
                self.wire.change(text)
                self.counts["changes"] += 1
                self.codecs.add(text)
            except thinwire.ThinwireError:
                self.counts["refused"] += 1  # chains of nodes, where nodes are not known
        if self.common.random() < 0.02 and "density" in self.wire.strategy.adjustable:
            self.wire.set(density=self.common.choice([0.001, 0.01, 0.2, 1.0]))
            self.counts["settings"] += 1
        if self.common.random() < 0.01:
            file = io.BytesIO()
            torch.save(self.wire.state_dict(), file)
            file.seek(0)
            self.wire.load_state_dict(torch.load(file, weights_only=True))
            self.counts["resumes"] += 1

    def _left(self) -> dict[str, Tensor]:
        """What this rank has not sent, by name; the sum over ranks is what nobody has."""
        if self.wire.executor is None:
            return {}
        (rank_state,) = self.wire.executor.rank_states
        left = {name: residual.double() for name, residual in rank_state.residuals.named()}
        for run in rank_state.groups:
            for p in run.info.parameters if run.inherited is not None else ():
                assert run.inherited is not None
                waiting = run.inherited[p.offset : p.offset + p.elements].view(p.shape).double()
                left[p.name] = left[p.name] + waiting if p.name in left else waiting
        return left

    def _check(self, step: int, before: dict[str, Tensor], void: bool) -> None:
        self.counts["checks"] += 1
        where = f"step {step}, rank {self.rank}, {self.wire.strategy.full}, {self.fault}"
        digests: list[Any] = [None] * self.world
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        bits = hash(b"".join(g.numpy().tobytes() for g in gradients if not void))
        dist.all_gather_object(digests, (digest(self.model), void, bits if os.environ.get("PYTHONHASHSEED") else 0))
        assert len(set(digests)) == 1, f"{where}: replicas differ: {digests}"
        after = self._left()
        for name, left in after.items():
            assert bool(torch.isfinite(left).all()), f"{where}: the residual of {name} is not finite"
        for name, parameter in self.named.items():
            assert parameter.grad is not None
            nothing = torch.zeros(parameter.shape, dtype=torch.float64)
            given = self.given[name].double()
            sent = before.get(name, nothing) + given - after.get(name, nothing)
            sizes = before.get(name, nothing).abs() + given.abs() + after.get(name, nothing).abs()
            sums = torch.stack([sent, sizes])
            dist.all_reduce(sums)
            if void:
                continue
            off = (sums[0] / self.world - parameter.grad.double()).abs()
            # Products of matrices round relative to the largest element, words of 16 bits by their own precision.
            codec = self.wire.strategy.assignments[0].codec
            narrow = isinstance(codec, thinwire.Cast) or getattr(codec, "values", "fp32") != "fp32"
            coarse = 0.01 if narrow else ALLOWED
            allowed = sums[1].max() / self.world * coarse + 1e-30
            assert float(off.max()) <= float(allowed), f"{where}: {float(off.max()):.3g} of {name} is lost"


def soak(steps: int, seed: int = 0, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Run one rank; its numbers. Raises on the first thing that is wrong."""
    job = Soak(seed)
    memory: dict[int, int] = {}
    begun = time.monotonic()
    for step in range(steps):
        job.step(step)
        if (step + 1) % 250 == 0 or step + 1 == steps:
            gc.collect()
            memory[step + 1] = resident_bytes()
            seconds = time.monotonic() - begun
            tell(f"step {step + 1}: {memory[step + 1] / 1e6:.1f} MB, {1000 * seconds / (step + 1):.1f} ms a step")
    for hook in job.hooks:  # the garbage collector does not see that they refer to the job
        hook.remove()
    settled = max((size for at, size in memory.items() if at <= SETTLED), default=0)
    last = max(size for at, size in memory.items() if at > steps - 1000)
    growth = last / settled - 1.0 if steps > SETTLED else 0.0
    return {"steps": steps, "codecs": len(job.codecs), **job.counts, "memory_bytes": last, "growth": growth}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _as_rank(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = soak(steps, seed, lambda text: print(text, flush=True))
    print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", default="", help="for links that change their speed: 100mbit,1gbit,none")
    options = parser.parse_args()
    if "RANK" in os.environ:
        _as_rank(options.steps, options.seed)
        return 0
    from thinwire.lab import Cluster

    lines: list[str] = []

    def note(rank: int, line: str) -> None:
        lines.append(line)
        if rank == 0 or not line.startswith("step "):
            print(f"[{rank}] {line}", flush=True)

    rates = [rate for rate in options.rates.split(",") if rate]
    dice = random.Random(options.seed)
    with Cluster(
        nodes=options.ranks, rate=rates[0] if rates else "none", mode=None if rates else "loopback"
    ) as cluster:
        command = [sys.executable, __file__, "--steps", str(options.steps), "--seed", str(options.seed)]
        job = cluster.start(command, {"PYTHONHASHSEED": "0"}, on_line=note)
        while rates and cluster.shaped and job.running:
            time.sleep(dice.uniform(1.0, 5.0))
            cluster.set_rate(dice.choice(rates), node=dice.randrange(options.ranks))
        ended = job.wait()
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    worst = max((result["growth"] for result in results), default=0.0)
    good = ended.code == 0 and len(results) == options.ranks and worst < 0.01
    print(f"{'passed' if good else 'FAILED'}: memory grew by {100 * worst:.2f} % after step {SETTLED}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
