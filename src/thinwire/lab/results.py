"""The one form of all result files: command, machine, versions, flat rows, a summary."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def result(command: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """The content of a result file. Rows are flat; seconds, bytes and ratios are numbers."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("thinwire", "torch", "numba"):
        versions[package] = metadata.version(package)
    return {
        "command": command,
        "machine": {"system": platform.platform(), "processor": _processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": versions,
        "rows": rows,
        "summary": summary,
    }


def write(path: Path | None, command: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Write a result file, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(result(command, rows, summary), indent=2) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
