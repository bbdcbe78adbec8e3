"""A small run of `tests/fuzz.py`, and texts as hypothesis makes them: only named errors, whatever somebody wrote."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import thinwire
from tests.hostile import attacks, decoders, exchanges, readers
from tests.support.profiles import tries
from thinwire.chains.chain import choose
from thinwire.cli.app import app
from thinwire.errors import CodecTextError, MessageCount, MessageError, ThinwireError

NAMES = {error.__name__ for error in MessageError.__subclasses__()}


def test_messages_of_every_codec() -> None:
    outcomes = decoders.storm(seed=1, count=3000)
    assert set(outcomes) == NAMES | {"valid"}


@pytest.mark.parametrize("text", ["micro(density=0.1)", "adacomp", "int8", "topk(density=0.1) via B"])
def test_exchanges_with_a_spoilt_message(text: str) -> None:
    outcomes = exchanges.storm(text, seed=2, count=60)
    assert outcomes["MessageVersion"] > 0
    assert outcomes["valid"] > 0


def test_files_and_texts(tmp_path: Path) -> None:
    outcomes = readers.storm(tmp_path, seed=3, count=600)
    for reader in readers.readers(tmp_path):
        named = sum(count for (name, outcome), count in outcomes.items() if name == reader.name and outcome != "valid")
        assert named > 10 or reader.name == "record of a cluster", f"{reader.name}: hardly anything was refused"


def test_every_good_sample_is_read(tmp_path: Path) -> None:
    for reader in readers.readers(tmp_path):
        for sample in reader.samples:
            reader.read(sample)


WORDS = st.sampled_from(
    [
        "topk",
        "micro",
        "density",
        "(",
        ")",
        "=",
        ",",
        "0.01",
        "1e999",
        "-1",
        "'fp16'",
        " via ",
        "B",
        "comp",
        "fAGc",
        "dec",
        "@cpu",
    ]
)


@settings(max_examples=tries(300))
@given(st.one_of(st.text(), st.lists(WORDS, max_size=12).map("".join)))
@example("topk(density=" + "-" * 5000 + "1)")
@example("topk(density=Warmup(to=" + "(" * 500 + "0.1" + ")" * 500 + ", steps=3))")
@example("topk(**{'density': 0.1})")
def test_any_text(text: str) -> None:
    for read in (thinwire.parse, choose):
        with contextlib.suppress(ThinwireError):
            read(text)


@pytest.mark.parametrize(
    ("command", "sample"),
    [
        (["demo", "--codec"], "micro(density=0.01)"),
        (["demo", "--rate"], "100mbit"),
        (["bench", "kernels", "--density"], "0.01"),
        (["bench", "kernels", "--codec"], "topk(density=0.01)"),
        (["bench", "step", "--rates"], "100mbit,1gbit"),
        (["bench", "step", "--methods"], "fp32,updates(randomblock(ratio=64), 0.3)"),
        (["bench", "step", "--nodes"], "2,4"),
        (["lab", "run", "--rate"], "1gbit"),
    ],
)
def test_values_on_the_command_line(command: list[str], sample: str) -> None:
    """What begins with a question mark is wrong everywhere: a message, an exit code, and no traceback."""
    random = np.random.default_rng(6)
    more = ["--", "true"] if command[0] == "lab" else []
    for _ in range(6):
        value = "?" + attacks.spoil_text(random, sample).replace("\x00", "")
        ended = CliRunner().invoke(app, [*command, value, *more])
        assert ended.exit_code in (1, 2), (value, ended.output)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), value
        assert "Traceback" not in ended.output


def test_nothing_in_a_text_is_executed(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for text in (f"topk(density=open({str(ran)!r}, 'w'))", f"open({str(ran)!r}, 'w')", "topk(density=().__class__)"):
        with pytest.raises(CodecTextError):
            thinwire.parse(text)
    assert not ran.exists()


def test_a_count_that_no_partition_has_takes_no_memory() -> None:
    target = decoders.Target("micro(density=0.05)", decoders.GROUPS[2], np.random.default_rng(0))
    messages = [message.clone() for message in target.pool[0]]
    messages[1][4:8] = 255  # entries: 4294967295
    with pytest.raises(MessageCount, match="found 4294967295 from rank 1, its partition has"):
        target.decoders()["read"](messages)


def test_a_spoilt_text_differs() -> None:
    random = np.random.default_rng(4)
    assert len({attacks.spoil_text(random, "topk(density=0.1)") for _ in range(100)}) > 90
