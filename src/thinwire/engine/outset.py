"""Before the first exchange of a runner: whether all ranks stand at the same place."""

from __future__ import annotations

import hashlib

import msgspec

from ..errors import AttachError, ExchangeError
from ..schemes.world import TorchWorld
from .agree import agree
from .layout import Layout
from .member import Member


def compare(world: TorchWorld, layout: Layout, member: Member) -> None:
    """Raise on every rank if one has loaded the state of another step, say. A collective, of a few bytes.

    Loading is local, so nobody has noticed. Shared random choices would then differ without a word, and messages of
    different lengths would end the peers.
    """
    # In a chain, ranks that never meet may have different capacities.
    sizes = [run.capacity.value if run.capacity is not None and run.chain is None else 0 for run in member.groups]
    facts = {"step": member.step, "sizes of messages": sizes, "layout": _fingerprint(layout)}
    try:
        agree(world.groups[0], facts)
    except AttachError as error:
        raise ExchangeError(
            f"before the first exchange at step {member.step}, rank {member.rank}: {error}; load states that were saved "
            "after the same step on all ranks"
        ) from None


def _fingerprint(layout: Layout) -> str:
    return hashlib.sha256(msgspec.json.encode(layout)).hexdigest()[:16]
