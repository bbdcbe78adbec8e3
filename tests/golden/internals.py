"""The only imports of the golden tests that are not public: a rename inside thinwire changes this file and no other here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from thinwire import messages
from thinwire.auto import plan_cache as kept
from thinwire.cli import lab as _lab
from thinwire.cli import profile as _profile
from thinwire.cli.app import app
from thinwire.codecs import CODECS, GatheredCodec, GroupInfo, ParameterInfo
from thinwire.ddp.attach import check_job
from thinwire.ddp.attach import stream_wire as _stream_wire
from thinwire.ddp.wire import parameters_of
from thinwire.engine import journal
from thinwire.engine.layout import TensorInfo, describe, kinds_of
from thinwire.engine.strategy import Strategy
from thinwire.lab.launch import Result
from thinwire.planner.profile import Cluster, Profile

__all__ = [
    "CODECS",
    "Cluster",
    "GatheredCodec",
    "GroupInfo",
    "ParameterInfo",
    "Profile",
    "TensorInfo",
    "app",
    "columns_of_lab_run",
    "columns_of_profile",
    "journal",
    "kept",
    "messages",
    "stream_wire",
]


def stream_wire(ddp: DistributedDataParallel, text: str, min_elements: int) -> Any:
    """What `attach` makes of parameters on a GPU, here on the CPU."""
    strategy = Strategy.of(text)
    check_job(ddp, strategy)
    kinds = kinds_of(ddp.module)
    tensors = [describe(name, p, kinds.get(name)) for name, p in parameters_of(ddp).items()]
    return _stream_wire(ddp, strategy, tensors, min_elements=min_elements)


def columns_of_profile(profile: Profile) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `thinwire profile --json` writes of a profile: rows and summary."""
    return _profile._rows(profile)


def columns_of_lab_run() -> list[dict[str, Any]]:
    """What `thinwire lab run --json` writes of each rank, here of a job of one."""
    ended = Result(0, [0], None, False, 1.0, True, [[]], [])
    return _lab._rows(SimpleNamespace(ranks_per_node=1), ended)  # type: ignore[arg-type]


def use_at_once(wire: Any, plan: Any) -> None:
    """As when the trajectory was recorded: without a look at DDP alone first, and faster than that, whatever the clock says."""
    wire.tuner.job.baseline = 1e9
    wire.tuner.in_use.switch(plan, "as recorded")
