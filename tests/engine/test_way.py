"""The way of one gradient, from DDP's hook to the end of its future: which files and generators it passes."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import thinwire
from tests.models import train, wrapped
from tests.ranks import run
from thinwire.codecs import parse
from thinwire.engine.rehearsal import rehearse

SOURCE = Path(thinwire.__file__).parent
CODEC = "micro(density=0.05)"
MOST_FILES, MOST_GENERATORS, LONGEST_FILE = 15, 3, 400
MERGED = ("codecs/driver.py", "comm/collectives.py", "engine/recorder.py")
"""Files that hold more than one class of the way: not at the price of their length."""
WARM_UP = 6


class Trail:
    """Notes the code of thinwire that is entered, in every thread that starts from now on, while `open`."""

    def __init__(self) -> None:
        self.open = False
        self.codes: set[CodeType] = set()

    def __enter__(self) -> Trail:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.open and event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            self.codes.add(frame.f_code)

    @property
    def files(self) -> list[str]:
        return sorted({str(Path(code.co_filename).relative_to(SOURCE)) for code in self.codes})

    @property
    def generators(self) -> list[str]:
        return sorted(
            f"{Path(code.co_filename).relative_to(SOURCE)}: {code.co_qualname}"
            for code in self.codes
            if code.co_flags & inspect.CO_GENERATOR
        )


def _steady_step(folder: str) -> tuple[list[str], list[str], int]:
    ddp = wrapped()
    rehearse(parse(CODEC))  # compilers are slow while they are profiled
    with Trail() as trail:
        wire = thinwire.attach(ddp, CODEC)
        wire.log_to(folder)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        train(ddp, optimizer, range(WARM_UP))
        # Until the next step is over: the recorder writes a step down when its last future has ended.
        trail.open = True
        train(ddp, optimizer, range(WARM_UP, WARM_UP + 2))
        trail.open = False
        steps = wire.stats()["steps"]
    return trail.files, trail.generators, steps


def test_a_gradient_passes_few_files_and_generators(tmp_path: Path) -> None:
    for files, generators, steps in run(2, _steady_step, str(tmp_path), hang=240.0):
        assert steps == WARM_UP, "all steps but the first two were exchanged by the layout"
        assert "engine/scheduler.py" in files
        assert "engine/recorder.py" in files
        assert len(files) <= MOST_FILES, "\n".join([f"{len(files)} files:", *files])
        assert len(generators) <= MOST_GENERATORS, "\n".join([f"{len(generators)} generators:", *generators])
        long = {name: lines for name in MERGED if (lines := (SOURCE / name).read_text().count("\n")) > LONGEST_FILE}
        assert not long, f"more than {LONGEST_FILE} lines: {long}"
