"""Record what `auto` measures on a busy machine: `python -m tests.auto.record FILE`. It writes `noisy.json`.

For each link, jobs are measured while other processes compute without end, several times each, and once without them: that
profile says what steps really take. The jobs only measure; what is decided on it is the subject of `test_replay`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

LINKS: tuple[str, ...] = ("1gbit", "loopback", "300mbit")
LOOPS = (2, 4, 8)
TIMES, STEPS = 5, 10
ROOT = Path(__file__).parents[2]


@contextmanager
def busy(loops: int, seconds: float = 600.0) -> Iterator[None]:
    """Endless loops beside what runs here, which start and stop at random. They end by themselves, and with the block."""
    code = (
        "import random, sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end:\n"
        "    stop = time.monotonic() + random.uniform(0.5, 4.0)\n    while time.monotonic() < stop: pass\n"
        "    time.sleep(random.uniform(0.0, 2.0))\n"
    )
    found = [subprocess.Popen([sys.executable, "-c", code, str(seconds)]) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in found:
            loop.kill()
            loop.wait()


def short(value: Any) -> Any:
    """Numbers with four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: short(part) for key, part in value.items()}
    return [short(part) for part in value] if isinstance(value, list | tuple) else value


def job() -> None:
    """One rank: rank 0 prints each profile, with the steps of DDP alone that were seen before it and after it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from thinwire.auto.candidates import CANDIDATES
    from thinwire.auto.first_plan import MEASUREMENT
    from thinwire.auto.meter import Meter
    from thinwire.auto.profiling import Profiling
    from thinwire.comm.world import TorchWorld
    from thinwire.lab.hard_exit import hard_exit
    from thinwire.lab.workloads import load
    from thinwire.profiler.watch import Compute

    times = int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, rank = load("gpt-small"), dist.get_rank()
    ddp = DistributedDataParallel(work.model(), bucket_cap_mb=4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    profiling = Profiling(ddp)
    meter = Meter(profiling, TorchWorld(dist.group.WORLD, 1))
    step = 0

    def train() -> float:
        nonlocal step
        optimizer.zero_grad()
        work.loss(ddp, work.batch(step, rank)).backward()
        optimizer.step()
        step += 1
        return meter.step()

    for _ in range(times):
        profiling.begin()
        while not profiling.ready:
            train()
        compute: Compute = meter.compute()
        measuring, profile = meter.measuring(CANDIDATES["high"], MEASUREMENT), None
        while profile is None:
            profile = meter.slice(measuring)
            if profile is None:
                train()
        borders = profiling.borders(profile)
        profiling.rest()
        walls = torch.tensor([train() for _ in range(STEPS)], dtype=torch.float64)
        dist.all_reduce(walls, op=dist.ReduceOp.AVG)
        found = {
            "native": compute.wall,
            "unsteady": compute.unsteady,
            "crowd": compute.crowd,
            "compute": compute.forward + compute.backward + compute.optimizer,
            "borders": borders,
            "walls": walls.tolist(),
            "profile": msgspec.to_builtins(profile),
        }
        if rank == 0:
            print(json.dumps(short(found)), flush=True)
    dist.barrier()
    hard_exit()


def record(link: str, loops: int, times: int) -> list[dict[str, Any]]:
    from thinwire.lab import Cluster

    found: list[dict[str, Any]] = []

    def hear(rank: int, line: str) -> None:
        if line.startswith("{"):
            found.append(json.loads(line))
        else:
            print(line, file=sys.stderr)

    rate, mode = (None, "loopback") if link == "loopback" else (link, None)
    with busy(loops), Cluster(2, rate=rate, mode=mode) as cluster:  # type: ignore[arg-type]
        code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'src')]!r}; sys.argv = ['', 'job', '{times}']; "
        result = cluster.run([sys.executable, "-c", code + "from tests.auto.record import job; job()"], on_line=hear)
    assert result.code == 0
    return found


def main() -> None:
    """Arguments: the file; "calm" for the profiles without loops, or nothing for the others, which it must have."""
    file, calm = Path(sys.argv[1]), "calm" in sys.argv
    data = json.loads(file.read_text()) if file.exists() else {"calm": {}, "noisy": []}
    for link in LINKS:
        if calm and link not in data["calm"]:
            data["calm"][link] = record(link, 0, 1)[-1]
        for loops in () if calm else LOOPS:
            for found in record(link, loops, TIMES):
                data["noisy"].append({"link": link, "loops": loops, **found})
            _write(file, data)
    _write(file, data)


def _write(file: Path, data: dict[str, Any]) -> None:
    # Names, shapes and kinds of tensors are the same in all of them.
    first = data["calm"][LINKS[0]]["profile"]["tensors"]
    for found in [*data["calm"].values(), *data["noisy"]]:
        tensors = found["profile"]["tensors"]
        if tensors and isinstance(tensors[0], dict):
            found["ready"] = {tensor["name"]: [tensor["ready"], tensor["energy"]] for tensor in tensors}
            found["profile"]["tensors"] = []
    data.setdefault("tensors", first)
    rows = ",\n".join(json.dumps(found, separators=(",", ":")) for found in data["noisy"])
    head = json.dumps({key: data[key] for key in ("tensors", "calm")}, separators=(",", ":"))
    file.write_text(f'{head[:-1]},\n"noisy":[\n{rows}\n]}}\n')


if __name__ == "__main__":
    job() if sys.argv[1:2] == ["job"] else main()
