"""What `attach` says while it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.limits import CEILING

ATTACH = """
import sys
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import thinwire
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
thinwire.attach(DistributedDataParallel(nn.Linear(100, 100)), "int8").close()
dist.destroy_process_group()
"""


def _said(folder: Path, store: str) -> list[str]:
    environment = {**os.environ, "THINWIRE_CACHE_DIR": str(folder), "THINWIRE_LOG": "info"}
    words = [sys.executable, "-c", ATTACH, str(folder / store)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=CEILING)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.split("\n") if "compil" in line]


def test_one_line_the_first_time_and_none_after_it(tmp_path: Path) -> None:
    (line,) = _said(tmp_path, "first")
    assert "the kernels of int8, once per machine" in line
    assert _said(tmp_path, "second") == []
