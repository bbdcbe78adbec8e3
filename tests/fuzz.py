"""Hostile input in bulk: `python tests/fuzz.py --messages 100000 --files 10000 --processes 2`.

Runs with Numba's bounds check on and a cache of kernels of its own, so that a decoder that reads where it may not raises
instead of reading. Only errors of thinwire are allowed. What ends in another one is kept in `build/fuzz`, with its seed, and
ends the run; `--storm NAME --seed SEED --batch COUNT` repeats it. A batch that has not ended after ten minutes hangs, and
ends the run with the place.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "fuzz"
HANG_SECONDS = 600
PROGRESS_SECONDS = 30
BATCH = 1000

Storm = Callable[[int, int], Counter[str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--storm", help="only this one, one batch of it")
    parser.add_argument("--batch", type=int, default=BATCH, help="how many of --storm")
    options = parser.parse_args()
    if os.environ.get("NUMBA_BOUNDSCHECK") != "1":
        environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(KEPT / "kernels")}
        return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], environment)
    _prepare()
    if options.storm:
        found = run_batch(options.storm, options.seed, options.batch)
        print(found if isinstance(found, str) else f"{options.batch} {options.storm}: {_words(found)}")
        return 1 if isinstance(found, str) else 0
    print(f"seed {options.seed}, {options.processes} processes", flush=True)
    plan = [(name, _share(name, options)) for name in storms()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, initializer=_prepare) as pool:
        for name, count in plan:
            if not _run(pool, name, options.seed, count, 2 * options.processes):
                pool.shutdown(cancel_futures=True)
                return 1
    print("passed: only named errors")
    return 0


def _share(name: str, options: argparse.Namespace) -> int:
    """How many of a storm: a whole exchange is as much work as fifty messages."""
    if name == "files and texts":
        return int(options.files)
    texts = sum(other.startswith("exchanges") for other in storms())
    return max(1, options.messages // 50 // texts) if name.startswith("exchanges") else int(options.messages)


def _run(pool: ProcessPoolExecutor, name: str, seed: int, count: int, ahead: int) -> bool:
    """All batches of a storm, `ahead` of them handed out at a time; False as soon as something escapes."""
    begun = said = time.monotonic()
    outcomes, done = Counter[str](), 0
    batches: Iterator[tuple[int, int]] = ((seed + at, min(BATCH, count - at)) for at in range(0, count, BATCH))
    running: dict[Future[Counter[str] | str], int] = {}
    while True:
        for at, size in batches:
            running[pool.submit(run_batch, name, at, size)] = size
            if len(running) >= ahead:
                break
        if not running:
            break
        for future in wait(running, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED).done:
            found = future.result()
            if isinstance(found, str):
                print(found, flush=True)
                return False
            outcomes += found
            done += running.pop(future)
        if time.monotonic() - said > PROGRESS_SECONDS and done < count:
            said = time.monotonic()
            print(f"  {name}: {done} of {count} after {said - begun:.0f} s", flush=True)
    print(f"{count} {name} in {time.monotonic() - begun:.0f} s: {_words(outcomes)}", flush=True)
    return True


def _words(outcomes: Counter[str]) -> str:
    return ", ".join(f"{times} {outcome}" for outcome, times in outcomes.most_common())


# -- in each process ---------------------------------------------------------------------------------------------------

_warm: set[str] = set()


def _prepare() -> None:
    sys.path[:0] = [str(path) for path in (ROOT / "src", ROOT) if str(path) not in sys.path]
    import torch

    from tests.hostile import mutator

    torch.set_num_threads(1)
    mutator.assert_bounds_are_checked()


@functools.cache
def storms() -> dict[str, Storm]:
    from tests.hostile import decoders, exchanges, mutator, readers

    def files(seed: int, count: int) -> Counter[str]:
        with tempfile.TemporaryDirectory() as folder:
            return _last(readers.storm(Path(folder), seed, count))

    found: dict[str, Storm] = {
        "messages of every codec": decoders.storm,
        "sparse messages": lambda seed, count: _last(mutator.storm(seed, count)),
        "files and texts": files,
    }
    for text in exchanges.TEXTS:
        if exchanges.messages_of(text):
            found[f"exchanges of {text}"] = functools.partial(exchanges.storm, text)
    return found


def _last(outcomes: Counter[tuple[str, str]]) -> Counter[str]:
    found = Counter[str]()
    for (_, outcome), times in outcomes.items():
        found[outcome] += times
    return found


def run_batch(name: str, seed: int, count: int) -> Counter[str] | str:
    """What came of a batch; or of what escaped, the words and where it is kept."""
    storm = storms()[name]
    try:
        if name not in _warm:
            storm(seed, 20)  # compiles kernels, which takes its time
            _warm.add(name)
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        return storm(seed, count)
    except Exception as error:
        KEPT.mkdir(parents=True, exist_ok=True)
        file = KEPT / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}.pickle"
        file.with_suffix(".txt").write_text(traceback.format_exc())
        with contextlib.suppress(Exception):  # not everything can be pickled; the seed gives it again
            file.write_bytes(pickle.dumps(getattr(error, "given", None)))
        again = f"python tests/fuzz.py --storm {name!r} --seed {seed} --batch {count}"
        return f"ESCAPED: {error!s:.1500}\nkept in {file}; again: {again}"
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
