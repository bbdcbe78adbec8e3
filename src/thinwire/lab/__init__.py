"""Experiments on one machine: an emulated cluster, workloads, benchmarks.

Names are loaded on first use, so that `LabError` is available without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calibrate import Calibration
    from .cluster import Cluster
    from .launch import Job, Result
    from .netns import Counters, LabError

__all__ = ["Calibration", "Cluster", "Counters", "Job", "LabError", "Result"]

_HOMES = {
    "Calibration": "calibrate",
    "Cluster": "cluster",
    "Counters": "netns",
    "Job": "launch",
    "LabError": "netns",
    "Result": "launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
