"""What `import thinwire` brings with it."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import thinwire
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_import_is_light() -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    added = set(json.loads(ran.stdout))
    assert "thinwire.frontends.ddp" in added
    heavy = ("numba", "llvmlite", "typer", "rich", "click", "thinwire.cli", "thinwire.lab", "thinwire.kernels.cpu")
    found = {name for name in added if any(name == h or name.startswith(f"{h}.") for h in heavy)}
    assert not found, f"`import thinwire` loads {sorted(found)}"
    timed = [line.rsplit("|", 1)[1].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")]
    assert "thinwire" in timed
    assert not set(timed) & set(heavy)
