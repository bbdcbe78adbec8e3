"""Trace marks of the training thread: forward, backward, optimizer. The hooks are removed when the trace is complete."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .watch import tensors_of


class Trace(Protocol):
    """Takes the marks: the recorder of a wire."""

    tracing: int
    """Steps that are still to be traced."""

    def mark(self, name: str) -> None: ...


class TraceHooks:
    """Tells a recorder when forward, backward and the optimizer begin; takes its hooks away when the trace is done."""

    def __init__(self, module: nn.Module, recorder: Trace) -> None:
        self._recorder = recorder
        self._in_backward = True
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(self._forward),
            module.register_forward_hook(self._forward_ends),
            register_optimizer_step_pre_hook(self._optimizer),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _forward(self, module: nn.Module, args: Any) -> None:
        if not self._recorder.tracing:
            self.close()  # here, in the thread that runs hooks
        elif torch.is_grad_enabled():
            self._recorder.mark("forward")
            self._in_backward = False

    def _forward_ends(self, module: nn.Module, args: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and self._recorder.tracing:
            self._recorder.mark("loss")
            for tensor in tensors_of(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._recorder.mark("backward")

    def _optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._recorder.mark("optimizer")

    def _optimizer_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._recorder.mark("between steps")
