"""`kill -9` at random moments, with `examples/resume.py` under torchrun:

    python -m tests.kills --kills 20

Every job is killed once (`--each` times): a random rank, at a random step, in the middle of whatever it does. torchrun starts
all ranks again, they resume from the last checkpoint, and the model at the end must have the bits of a job that was
left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODECS = ("micro(density=0.05)", "laplace(density=0.05)", "dense")
RANKS = (2, 3)
STEPS, EVERY = 60, 5
HANG_SECONDS = 300.0


@dataclass
class Outcome:
    model: str
    resumed: list[int]
    killed: list[int]
    """At which step the last line was written before each kill."""


def job(folder: Path, codec: str, ranks: int, kills: int, dice: random.Random, steps: int = STEPS) -> Outcome:
    """Run the example to its end, and kill a rank now and then."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun += ["--max-restarts", str(kills), "--monitor-interval", "0.1", str(ROOT / "examples" / "resume.py")]
    torchrun += ["--folder", str(folder), "--codec", codec, "--steps", str(steps), "--every", str(EVERY)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THINWIRE_LOG": "info"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or restarted ranks find the addresses of the dead ones
    with open(folder.with_suffix(".log"), "w+") as errors:
        process = subprocess.Popen(torchrun, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        try:
            outcome = _follow(process, ranks, sorted(dice.randrange(1, steps) for _ in range(kills)), dice)
        finally:
            _end(process)
        if process.returncode != 0 or not outcome.model:
            errors.seek(0)
            raise AssertionError(f"{codec} on {ranks} ranks ended with {process.returncode}: {errors.read()[-5000:]}")
    return outcome


def _follow(process: subprocess.Popen[str], ranks: int, moments: list[int], dice: random.Random) -> Outcome:
    outcome = Outcome("", [], [])
    assert process.stdout is not None
    with _alarm(process):
        for line in process.stdout:
            if found := re.match(r"resumed at step (\d+)", line):
                outcome.resumed.append(int(found[1]))
            elif found := re.match(r"step (\d+) ", line):
                if moments and int(found[1]) >= moments[0]:
                    moments.pop(0)
                    time.sleep(dice.uniform(0.0, 0.02))  # anywhere in this step, or in the next few
                    victims = _children(process.pid)
                    if len(victims) == ranks:
                        os.kill(dice.choice(victims), signal.SIGKILL)
                        outcome.killed.append(int(found[1]))
            elif found := re.match(r"model (\w+)", line):
                outcome.model = found[1]
        process.wait()
    return outcome


@contextlib.contextmanager
def _alarm(process: subprocess.Popen[str]) -> Iterator[None]:
    """End a job that hangs, so that its output ends."""
    import threading

    timer = threading.Timer(HANG_SECONDS, _end, [process])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # they may end at any time
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                if b"resume.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for pid in [*_children(process.pid), process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def campaign(kills: int, each: int, codecs: tuple[str, ...], ranks: tuple[int, ...], seed: int, folder: Path) -> int:
    """Jobs over all codecs and numbers of ranks until there were enough kills; how many."""
    dice = random.Random(seed)
    alone: dict[tuple[str, int], str] = {}
    done = number = 0
    kinds = [(codec, count) for count in ranks for codec in codecs]
    while done < kills:
        codec, count = kinds[number % len(kinds)]
        if (codec, count) not in alone:
            alone[codec, count] = job(folder / f"alone{number}", codec, count, 0, dice).model
        outcome = job(folder / f"job{number}", codec, count, min(each, kills - done), dice)
        assert outcome.model == alone[codec, count], f"{codec}, {count} ranks, {outcome}"
        done += len(outcome.killed)
        number += 1
        print(
            f"{done:3d} kills, {codec} on {count} ranks: {outcome.killed} resumed {outcome.resumed}: same", flush=True
        )
    return done


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--each", type=int, default=1, help="kills in one job")
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = campaign(given.kills, given.each, CODECS, RANKS, given.seed, Path(folder))
    print(f"{done} of {done} resumed with the same bits")


if __name__ == "__main__":
    main()
