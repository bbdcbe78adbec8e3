"""The side stream of a wire on a GPU, which runs while backward uses another."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.futures import Future


def on(device: torch.device | None) -> contextlib.AbstractContextManager[None]:
    """Make a GPU the current one; nothing for other devices."""
    if device is None or device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class Lane:
    """Where a wire works: on a separate stream of a GPU; on CPU tensors immediately, in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def future(self) -> Future[Tensor]:
        return Future() if self._stream is None else Future(devices=[self.device])

    @contextlib.contextmanager
    def after(self, tensor: Tensor) -> Iterator[None]:
        """Work in it, after whatever was asked for so far; `tensor`, of another stream, is used here."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the caller's stream wait for all work in this one."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if self._stream is not None:
            self._stream.synchronize()

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """int64 on the device. From pinned memory: a copy from other memory would wait for the stream."""
        host = torch.tensor(numbers, dtype=torch.int64)
        return host if self._stream is None else host.pin_memory().to(self.device, non_blocking=True)
