"""What `make test` runs: pytest in passes, with one summary and one exit code.

    python -m tests.run [quick|long] [words for pytest...]

First what runs in memory and with real ranks, on two workers; then what must be alone on the machine, the emulated
clusters and the examples, one after the other. Both passes have workers of pytest-xdist, so that a test that is stuck
costs its worker and not the run (see `tests/support/watchdog.py`). Ctrl-C ends the run with the summary so far.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "build" / "tests"
PATIENCE = 30.0
"""Seconds for pytest to end after Ctrl-C."""

SHARED = ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
ALONE = ["-n", "1"]
# What `make test-long` adds, and nothing else: the slow tests, and the properties with many more examples.
LARGE = ["--hypothesis-profile", "large"]
PASSES = {
    "": [
        ("in memory and with ranks", [*SHARED, "-m", "(unit or ranks) and not slow"]),
        ("clusters and examples", [*ALONE, "-m", "(lab or examples) and not slow"]),
    ],
    "quick": [("quick", [*SHARED, "-m", "quick and not slow"])],
    "long": [
        ("properties at large and slow tests", [*SHARED, *LARGE, "-m", "(unit or ranks) and (hypothesis or slow)"]),
        ("slow clusters and examples", [*ALONE, *LARGE, "-m", "(lab or examples) and (hypothesis or slow)"]),
    ],
}
NO_TESTS = 5  # pytest's exit code


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problems: list[str] = field(default_factory=list)

    def read(self, file: Path, name: str, code: int) -> None:
        """Add the report of a pass, which is there unless pytest itself was killed."""
        before = len(self.problems)
        if file.exists():
            for case in ElementTree.parse(file).iter("testcase"):
                self._add(case)
        if code not in (0, NO_TESTS) and len(self.problems) == before:
            self.failed += 1
            self.problems.append(f"FAILED the pass {name!r}: pytest ended with {code}")

    def _add(self, case: ElementTree.Element) -> None:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            self.failed += 1
            place = (case.get("file") or (case.get("classname") or "").replace(".", "/") + ".py").strip()
            name = re.sub(r"@[^\]]*$", "", case.get("name") or "")  # the group of its worker
            said = problem.get("message") or ""
            self.problems.append(f"FAILED {place}::{name} - {said.strip().splitlines()[0] if said.strip() else '?'}")
        elif case.find("skipped") is not None:
            self.skipped += 1
        else:
            self.passed += 1

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


class Runner:
    """Runs the passes, each in a process group of its own, which is told of the signals that come here."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._end)
            elif (
                number == signal.SIGINT
            ):  # in the background: without effect here, but pytest must hear what is sent to it
                signal.signal(number, lambda *_: None)

    def _end(self, number: int, frame: object) -> None:
        first, self.signal = not self.signal, number
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGINT if first else signal.SIGKILL)

    def run(self, words: list[str]) -> int:
        if self.signal:
            return 2
        self.process = subprocess.Popen([sys.executable, "-m", "pytest", *words], cwd=ROOT, process_group=0)
        asked = None
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(timeout=1.0)
            asked = asked or (time.monotonic() if self.signal else None)
            if asked is not None and time.monotonic() - asked > PATIENCE:
                os.killpg(self.process.pid, signal.SIGKILL)


def main(words: list[str]) -> int:
    which = words.pop(0) if words and words[0] in PASSES else ""
    runner, tally = Runner(), Tally()
    REPORTS.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    for number, (name, options) in enumerate(PASSES[which]):
        if runner.signal:
            break
        print(f"\n{name}:", flush=True)
        report = REPORTS / f"{which or 'test'}-{number}.xml"
        report.unlink(missing_ok=True)
        # -v against the -q of the settings: the counts of a pass stand in a line of "=", not alone on theirs.
        more = ["-v", "-rsfE", "--durations=30", f"--junitxml={report}", "-o", "junit_family=xunit1", *words]
        code = runner.run([*options, *more])
        tally.read(report, name, 0 if runner.signal else code)
    print("\n".join(["", *tally.problems]))
    if runner.signal:
        print(f"interrupted by {signal.Signals(runner.signal).name}: this is the summary so far")
    print(f"tests: {time.monotonic() - begun:.0f} s")
    print(tally, flush=True)
    if runner.signal:
        return 128 + runner.signal
    return 1 if tally.failed or not tally.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
