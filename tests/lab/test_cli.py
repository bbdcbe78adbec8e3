"""`thinwire lab` as somebody types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import CEILING

from .conftest import COMMAND, left_of, needs_namespaces, own_records, thinwire_lab


@needs_namespaces
def test_run(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--nodes", "2", "--rate", "100mbit", "--no-calibrate", "--json", str(file)]
    done = thinwire_lab("run", *words, "--", "sh", "-c", 'echo "$0 $RANK $WORLD_SIZE"; exit $((RANK * 3))', "--rate")
    assert done.returncode == 3, done.stderr
    assert set(done.stdout.splitlines()) >= {"[1] --rate 1 2"}
    assert "rank 1 failed with code 3" in done.stderr
    report = json.loads(file.read_text())
    assert report["command"] == "lab run"
    assert set(report) == {"command", "machine", "versions", "rows", "summary"}
    assert [row["rank"] for row in report["rows"]] == [0, 1]
    assert report["rows"][1]["exit_code"] == 3
    assert report["rows"][0]["node_bytes_sent"] >= 0
    assert report["summary"]["rate"] == "100mbit"
    assert report["summary"]["shaped"] is True
    assert own_records() == []


@needs_namespaces
def test_run_calibrates() -> None:
    done = thinwire_lab("run", "--nodes", "2", "--rate", "1gbit", "true")
    assert done.returncode == 0, done.stderr
    assert "rate 1gbit, measured: 64 KB" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--rate", "fast", "--", "true"], "'fast'"),
        (["run", "--nodes", "0", "--", "true"], "--nodes"),
        (["run"], "COMMAND"),
        (["down", "tw123"], "'tw123'"),
    ],
)
def test_errors_are_sentences(words: list[str], said: str) -> None:
    done = thinwire_lab(*words)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@needs_namespaces
@pytest.mark.parametrize("by", ["interrupt", "lab down"])
def test_up_stays_until_it_is_asked(by: str, tmp_path: Path) -> None:
    place, end = tmp_path / "up.json", tmp_path / "down.json"
    # A shell hands down to a job in the background that SIGINT is ignored.
    program = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + COMMAND
    process = subprocess.Popen(
        [sys.executable, "-c", program, "up", "--nodes", "2", "--json", str(place)], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        identity = process.stderr.readline().split()[1].rstrip(":")
        said = ""
        while "stays up" not in (line := process.stderr.readline()):
            said += line
        assert f"ip netns exec {identity}-n1 bash" in said
        assert left_of(identity)
        content = json.loads(place.read_text())
        assert content["summary"]["cluster"] == identity
        assert [row["node"] for row in content["rows"]] == [0, 1]
        assert content["rows"][1]["enter"] in said
        if by == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            assert identity in thinwire_lab("down", "--json", str(end)).stderr
            assert identity in {row["cluster"] for row in json.loads(end.read_text())["rows"]}
        assert "gone" in process.communicate(timeout=CEILING)[1]
    finally:
        process.terminate()
        process.communicate(timeout=CEILING)
    assert process.returncode == 0
    assert left_of(identity) == []


def test_help_has_examples() -> None:
    done = thinwire_lab("run", "--help")
    assert "thinwire lab run --nodes 2 --rate 100mbit -- python train.py" in " ".join(done.stdout.split())
