"""Makes and ends clusters over and over, some of them by kill -9 half-way, and looks for what is left.

python -m tests.lab.cycles --cycles 50 --kills 10
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests.support.limits import CEILING

from .conftest import OWNER, any_mode, host_state, left_of, own_records, thinwire_lab


def cycle(kill_after: float | None, mode: str) -> set[str]:
    """One program with a cluster; ended by SIGTERM when its job runs, or killed so many seconds after its start."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if kill_after is not None:
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    else:
        for line in process.stdout:
            if line.startswith("[1] ready"):
                process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=CEILING)
    return {line.strip() for line in output.splitlines() if line.startswith("tw")}


def cycles(count: int, kills: int, mode: str, seed: int = 0) -> dict[str, int]:
    """Runs them; fails if anything is left at the end. Says how many were killed before, during and after `up`."""
    source = random.Random(seed)
    killed = set(source.sample(range(count), kills))
    before = host_state()
    seen: set[str] = set()
    tally = {"ended": 0, "killed": 0, "killed with a cluster": 0}
    for index in range(count):
        # From the start of Python, over the making of the cluster, to a running job.
        kill_after = source.uniform(0.1, 0.5) if index in killed else None
        known = {record.identity for record in own_records()}
        seen |= cycle(kill_after, mode)
        left = {record.identity for record in own_records()} - known
        seen |= left
        tally["ended" if kill_after is None else "killed"] += 1
        tally["killed with a cluster"] += bool(left)
        assert kill_after is not None or not left, f"SIGTERM left {left}"
    done = thinwire_lab("down", "--all")
    assert done.returncode == 0, done.stderr
    remains = {identity: left_of(identity) for identity in seen if left_of(identity)}
    assert not remains, remains
    assert own_records() == []
    assert host_state() == before
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--mode", default=any_mode())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        print(cycles(arguments.cycles, arguments.kills, arguments.mode, arguments.seed), "nothing left")


if __name__ == "__main__":
    main()
