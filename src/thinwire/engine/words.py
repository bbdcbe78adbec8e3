"""What ranks tell each other outside of steps: small values, as JSON. Nothing that a peer sends is unpickled."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ExchangeError
from ..schemes.world import device_of

SLICE_SECONDS = 0.2
LARGEST = 1 << 28


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, in rank order, as JSON knows them: tuples come as lists. A collective; Ctrl-C ends it."""
    device = device_of(group)
    mine = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = torch.empty(world, dtype=torch.int64, device=device)
    _wait(dist.all_gather_single(sizes, torch.tensor([mine.numel()], device=device), group=group, async_op=True))
    shortest, longest = int(sizes.min()), int(sizes.max())
    if shortest < 0 or longest > LARGEST:
        raise ExchangeError(
            f"a rank wants to say {longest if shortest >= 0 else shortest} bytes; {LARGEST} are possible"
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everything = torch.empty(world * longest, dtype=torch.uint8, device=device)
    _wait(dist.all_gather_single(everything, padded.to(device), group=group, async_op=True))
    texts = [row[:size] for row, size in zip(everything.cpu().view(world, longest), sizes.tolist(), strict=True)]
    return [_read(text, rank) for rank, text in enumerate(texts)]


def _read(text: Tensor, rank: int) -> Any:
    try:
        return msgspec.json.decode(text.numpy().tobytes())
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ExchangeError(f"rank {rank} sent words that cannot be read: {error}") from error


def _wait(work: dist.Work) -> None:
    """Wait in slices: a wait of torch's own does not hear Ctrl-C."""
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    while not ended.wait(SLICE_SECONDS):
        pass
    try:
        work.wait()
    except RuntimeError as error:
        raise ExchangeError(f"all-gather of what ranks tell each other outside of steps: {error}") from error
