"""Preflight check before the first exchange of an executor: all ranks must be at the same step, with the same layout."""

from __future__ import annotations

import hashlib

import msgspec

from ..comm.world import TorchWorld
from ..errors import AttachError, ExchangeError
from .consensus import agree
from .layout import Layout
from .rank_state import RankState


def compare(world: TorchWorld, layout: Layout, rank_state: RankState) -> None:
    """Raise on every rank if one has loaded the state of another step, say. A collective, of a few bytes.

    Loading is local, so no rank has noticed. Shared random choices would then differ without a word, and messages of
    different lengths would end the peers.
    """
    # In a chain, ranks that never meet may have different capacities.
    sizes = [driver.capacity.value if (driver := run.driver) and driver.capacity else 0 for run in rank_state.groups]
    facts = {"step": rank_state.step, "sizes of messages": sizes, "layout": _fingerprint(layout)}
    try:
        agree(world.groups[0], facts)
    except AttachError as error:
        raise ExchangeError(
            f"before the first exchange at step {rank_state.step}, rank {rank_state.rank}: {error}; load states "
            "that were saved after the same step on all ranks"
        ) from None


def _fingerprint(layout: Layout) -> str:
    return hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16]
