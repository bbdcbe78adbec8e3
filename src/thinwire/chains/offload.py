"""Where compression runs. For CPU tensors: in the calling thread, which is the exchange thread.

EXPERIMENTAL for GPU tensors: the logic is tested with CPU tensors, but has never run on a GPU. `comp@cpu` and `dec@cpu` copy to
pinned memory on a separate stream, run the compiled kernels in a worker thread, and copy back on that stream, for which the
tensor's stream then waits. `comp` and `dec` without `@cpu` need GPU kernels, which do not exist yet.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import ChainError
from .tree import Leaf

Result = TypeVar("Result")


def make(device: torch.device, leaf: Leaf) -> Offload:
    """The offload for the compressions of a leaf, for tensors on a device."""
    if device.type == "cpu":
        return InThread()
    if any(op.routine in ("comp", "dec") and op.device != "cpu" for op in leaf.ops):
        raise ChainError(f"{leaf}: there are no kernels for {device} yet; write comp@cpu and dec@cpu")
    return ToHost(Copies(device))


class Offload(Protocol):
    """Fetch inputs, run, send results."""

    def fetch(self, tensor: Tensor, name: str) -> Tensor:
        """The tensor in host memory; `name` identifies the buffer."""

    def work(self, function: Callable[[], Result]) -> Result:
        """Run a function on the CPU, on what was fetched before."""

    def room(self, count: int, name: str, own: Tensor) -> Tensor:
        """float32 [count] in host memory; `own` if it is there already."""

    def send(self, host: Tensor, name: str, own: Tensor | None = None) -> Tensor:
        """The result on the device of the job's tensors; in `own` if given."""


class InThread(Offload):
    """CPU tensors, in the calling thread."""

    def fetch(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def work(self, function: Callable[[], Result]) -> Result:
        return function()

    def room(self, count: int, name: str, own: Tensor) -> Tensor:
        return own

    def send(self, host: Tensor, name: str, own: Tensor | None = None) -> Tensor:
        return host


class Copies:
    """Copies between a GPU and pinned memory, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def down(self, host: Tensor, tensor: Tensor) -> Callable[[], None]:
        """Start a copy to the host once the tensor is ready; returns a function that waits for it."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return event.synchronize

    def up(self, tensor: Tensor, host: Tensor) -> None:
        """Copy to the device; later work on its current stream waits for it."""
        with torch.cuda.stream(self.stream):
            tensor.copy_(host, non_blocking=True)
            tensor.record_stream(self.stream)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


class ToHost(Offload):
    """Tensors of another device: copies to the host, and a worker thread for the kernels."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinwire offload")
        self._waits: list[Callable[[], None]] = []
        self._hosts: dict[str, Tensor] = {}
        self._devices: dict[str, Tensor] = {}

    def fetch(self, tensor: Tensor, name: str) -> Tensor:
        host = self.room(tensor.numel(), name, tensor).view(tensor.shape)
        self._waits.append(self._copies.down(host, tensor))
        return host

    def work(self, function: Callable[[], Result]) -> Result:
        waits, self._waits = self._waits, []

        def wait_and_work() -> Result:
            for wait in waits:
                wait()
            return function()

        return self._worker.submit(wait_and_work).result()

    def room(self, count: int, name: str, own: Tensor) -> Tensor:
        held = self._hosts.get(name)
        if held is None or held.numel() < count or held.dtype != own.dtype:
            held = self._hosts[name] = self._copies.pinned(count, own.dtype)
        return held[:count]

    def send(self, host: Tensor, name: str, own: Tensor | None = None) -> Tensor:
        if own is None:
            held = self._devices.get(name)
            if held is None or held.numel() < host.numel() or held.dtype != host.dtype:
                held = self._devices[name] = self._copies.empty(host.numel(), host.dtype)
            own = held[: host.numel()].view(host.shape)
        self._copies.up(own, host)
        return own
