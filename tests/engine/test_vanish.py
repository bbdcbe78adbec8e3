"""A peer that is there and does not answer, a stopped process or a cut cable: an error that says where, and no hang."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from tests.engine.deserted import BEGUN, ROOT, Ranks
from tests.lab.conftest import any_mode, needs_namespaces
from tests.support.limits import CEILING
from thinwire.lab import Cluster

# Where the first exchange after the fault is: `attach` travels dense for two steps, which its step numbers do not count.
PLACES = {
    "attach:topk(density=0.05)": rf"group \d, step {BEGUN - 2}, all-gather of round 1, rank 0",
    "attach:topk(density=0.05) via K": rf"group \d, step {BEGUN - 2}, all-to-all of round 1, rank 0",
    "attach:dense": rf"bucket \d, dense step {BEGUN}, all-reduce \(average\), rank 0",
    "exchange:adacomp": rf"group \d, step {BEGUN}, all-gather of round 1, rank 0",
    "updates:randomblock(ratio=8)": rf"(head|bucket \d), step {BEGUN}, all-reduce \(average\), rank 0",
}


def check(text: str, way: str, place: str) -> None:
    failed = re.search(re.escape(f"{way}: failed: ") + "(.*?)" + re.escape(f"{way}: threads left: 0"), text, re.DOTALL)
    assert failed is not None, text
    assert re.search(place, failed[1]), text
    assert re.search(r"(?i)time(d )?out", failed[1]), text
    assert re.search(re.escape(f"{way}: closed by: ") + f".*{place}", text), text
    assert re.search(re.escape(f"{way}: then: ") + ".*(closed|have failed)", text, re.DOTALL), text


def test_a_rank_that_stops(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, "stop", *PLACES) as ranks:
        text, code = ranks.end_of(0)
        assert ranks.processes[1].poll() is None, "it was stopped, not ended"
    for way, place in PLACES.items():
        check(text, way, place)
    assert code == 0, text


@needs_namespaces
def test_a_cable_that_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody resets a connection: only the timeout can tell. The ranks on both sides end by themselves."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    lines: list[list[str]] = [[], [], []]
    begun = threading.Semaphore(0)

    def note(rank: int, line: str) -> None:
        lines[rank].append(line)
        if line == "begun":
            begun.release()

    way = "attach:topk(density=0.05)"
    program = (
        "import os; from tests.engine.deserted import main; "
        f"main(int(os.environ['RANK']), 3, 'env://', 'quiet', {way!r})"
    )
    with Cluster(nodes=3, rate="none", mode=any_mode()) as cluster:
        job = cluster.start([sys.executable, "-c", program], on_line=note, directory=str(ROOT))
        for _ in range(3):
            assert begun.acquire(timeout=CEILING), lines
        cluster.cut(2)
        result = job.wait(CEILING)
    assert result.codes == [0, 0, 0], lines
    for rank in range(3):
        check(
            "\n".join(lines[rank]),
            way,
            rf"(group \d+|small tensors), step \d+, all-(gather|reduce).* of round 1, rank {rank}",
        )


def test_a_rank_that_stops_and_goes_on(tmp_path: Path) -> None:
    """A short stop, of a debugger or a suspended machine, is no failure: within the timeout nothing is lost."""
    with Ranks(2, tmp_path, "pause", "exchange:topk(density=0.05)") as ranks:
        os.waitpid(ranks.processes[1].pid, os.WUNTRACED)
        ranks.processes[1].send_signal(signal.SIGCONT)
        ends = [ranks.end_of(rank) for rank in range(2)]
    for text, code in ends:
        assert text.endswith(f"begun\nsteps {3 * BEGUN}, None\n")
        assert code == 0, text
