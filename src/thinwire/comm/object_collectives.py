"""Object collectives outside of steps: small values, encoded as JSON. Nothing received is ever unpickled."""

import threading
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ExchangeError
from .world import device_of

SLICE_SECONDS = 0.2
LARGEST = 1 << 28

T = TypeVar("T")


def gather(value: Any, group: dist.ProcessGroup | None, kind: Any = Any) -> list[Any]:
    """All-gather a JSON value: those of all ranks, in rank order. Ctrl-C interrupts it.

    `kind` is the type of each value; without it they are what JSON knows: tuples arrive as lists.
    Two all-gathers: 8 bytes with the size, then the longest text per rank.
    """
    device = device_of(group)
    mine = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    world = dist.get_world_size(group)
    sizes = torch.empty(world, dtype=torch.int64, device=device)
    _wait(
        dist.all_gather_single(sizes, torch.tensor([mine.numel()], device=device), group=group, async_op=True),
        "all-gather",
    )
    shortest, longest = int(sizes.min()), int(sizes.max())
    if shortest < 0 or longest > LARGEST:
        raise ExchangeError(
            f"a rank wants to say {longest if shortest >= 0 else shortest} bytes; {LARGEST} are possible"
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everything = torch.empty(world * longest, dtype=torch.uint8, device=device)
    _wait(dist.all_gather_single(everything, padded.to(device), group=group, async_op=True), "all-gather")
    texts = [row[:size] for row, size in zip(everything.cpu().view(world, longest), sizes.tolist(), strict=True)]
    return [_read(text, rank, kind) for rank, text in enumerate(texts)]


def broadcast(value: Any, kind: type[T], group: dist.ProcessGroup | None) -> T:
    """The value of rank 0, of type `kind`, on all ranks. A collective; Ctrl-C ends it."""
    device = device_of(group)
    first = dist.get_rank(group) == 0
    mine = torch.frombuffer(bytearray(msgspec.json.encode(value if first else None)), dtype=torch.uint8)
    size = torch.tensor([mine.numel()], device=device)
    _wait(dist.broadcast(size, group=group, group_src=0, async_op=True), "broadcast")
    count = int(size)
    if not 0 <= count <= LARGEST:
        raise ExchangeError(f"rank 0 wants to say {count} bytes; {LARGEST} are possible")
    text = mine.to(device) if first else torch.empty(count, dtype=torch.uint8, device=device)
    _wait(dist.broadcast(text, group=group, group_src=0, async_op=True), "broadcast")
    found: T = _read(text.cpu(), 0, kind)
    return found


def _read(text: Tensor, rank: int, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(text.numpy().tobytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ExchangeError(f"rank {rank} sent words that cannot be read: {error}") from error


def _wait(work: dist.Work, name: str) -> None:
    """Wait in slices, because torch's own wait does not react to Ctrl-C."""
    ended = threading.Event()
    work.get_future().add_done_callback(lambda _: ended.set())
    while not ended.wait(SLICE_SECONDS):
        pass
    try:
        work.wait()
    except RuntimeError as error:
        raise ExchangeError(f"{name} of what ranks tell each other outside of steps: {error}") from error
