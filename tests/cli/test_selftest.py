"""`thinwire selftest`: the same checks with torchrun and without, and a failure on one rank is the verdict of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run
from tests.support.limits import CEILING
from thinwire.lab import selftest


def test_it_starts_ranks_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thinwire", "selftest", "--json", str(tmp_path / "result.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=CEILING, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "passed" in ended.stdout.splitlines()[-1]
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["summary"] == {"ranks": 2, "backend": "gloo", "passed": True}
    checks = {row["check"]: row["good"] for row in written["rows"]}
    assert all(checks.values())
    assert {"order", "roll-back", "resume", "refusals", "errors", "laws of micro"} <= set(checks)


FIRST_CHECK_ALONE = """
import sys
from thinwire.cli import main
from thinwire.lab import selftest
checks = selftest._checks()[:1]
selftest._checks = lambda: checks
sys.argv = ["thinwire", "selftest"]
main()
"""


def test_under_torchrun(tmp_path: Path) -> None:
    """With the ranks that there are; the checks themselves are the same ones, so the first is enough."""
    script = tmp_path / "first.py"
    script.write_text(FIRST_CHECK_ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=CEILING, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("passed: 1 checks") == 1, "only the first rank speaks"
    assert ended.stdout.startswith("2 ranks, ")


def _sabotaged(fault: str) -> list[tuple[str, bool, str]]:
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch:
        if fault == "forgets":

            def left(exchange: object) -> dict[str, object]:
                return {}

            patch.setattr(selftest, "_left", left)
            patch.setattr(selftest, "_checks", lambda: [("laws", lambda: selftest.laws_of("topk(density=0.1)"))])
        elif fault == "differs":
            real = selftest.Exchange.reduce_

            def reduce(self: selftest.Exchange, tensors: dict[str, object]) -> None:
                real(self, tensors)  # type: ignore[arg-type]
                if last:
                    tensors["bias"][0] += 1  # type: ignore[index]

            patch.setattr(selftest.Exchange, "reduce_", reduce)
            patch.setattr(selftest, "_checks", lambda: [("laws", lambda: selftest.laws_of("topk(density=0.1)"))])
        else:
            patch.setattr(
                selftest, "_checks", lambda: [("one", lambda: str(1 // (not last))), ("two", lambda: "fine")]
            )
        return [(outcome.name, outcome.good, outcome.text) for outcome in selftest.run(lambda outcome: None)]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("forgets", "neither sent nor in the residual"), ("differs", "differ"), ("raises", "ZeroDivisionError")],
)
def test_what_is_wrong_is_found(fault: str, text: str) -> None:
    results = run(2, _sabotaged, fault)
    assert results[0][0] == results[1][0], "all ranks hear of it"
    assert not results[0][0][1]
    assert text in results[0][0][2]
    if fault == "raises":
        assert "rank 1" in results[0][0][2]
        assert results[0][1][1], "and the next check goes on"
