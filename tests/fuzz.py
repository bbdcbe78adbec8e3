"""Hostile input in bulk: `python tests/fuzz.py --messages 100000 --files 10000`.

Runs with Numba's bounds check on and a cache of kernels of its own, so that a decoder that reads where it may not raises
instead of reading. Only errors of thinwire are allowed. A hang of a minute ends the run with the place.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANG_SECONDS = 60
BATCH = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if os.environ.get("NUMBA_BOUNDSCHECK") != "1":
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
            return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], environment)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    from tests.hostile import decoders, exchanges, mutator, readers

    mutator.assert_bounds_are_checked()
    seed = options.seed
    _run("messages of every codec", decoders.storm, seed, options.messages)
    _run("sparse messages", mutator.storm, seed, options.messages)
    texts = [text for text in exchanges.TEXTS if exchanges.messages_of(text)]
    each = max(1, options.messages // 50 // len(texts))
    for text in texts:
        _run(f"exchanges of {text}", lambda seed, count, text=text: exchanges.storm(text, seed, count), seed, each)
    with tempfile.TemporaryDirectory() as folder:
        _run("files and texts", lambda seed, count: readers.storm(Path(folder), seed, count), seed, options.files)
    print("passed: only named errors")
    return 0


def _run(name: str, storm: Callable[[int, int], Counter[object]], seed: int, count: int) -> None:
    storm(seed, 100)  # compiles kernels, which takes its time
    begun, outcomes, done = time.monotonic(), Counter[object](), 0
    while done < count:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        batch = min(BATCH, count - done)
        for outcome, times in storm(seed + done, batch).items():
            outcomes[outcome[-1] if isinstance(outcome, tuple) else outcome] += times
        done += batch
    faulthandler.cancel_dump_traceback_later()
    found = ", ".join(f"{times} {outcome}" for outcome, times in outcomes.most_common())
    print(f"{count} {name} in {time.monotonic() - begun:.0f} s: {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
