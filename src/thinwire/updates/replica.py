"""One rank's model and optimizer, and the parameters whose shared values local updates keep equal on all ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm.world import LocalWorld
from ..engine.ddp_module import attached, plain
from ..engine.layout import TensorInfo, describe, kinds_of
from ..errors import AttachError


@dataclass
class ParameterSlot:
    """One parameter.

    parameter  what the module computes with: between steps the detached point x - strength * residual
    point      what the optimizer steps: the parameter itself, or a float32 master of a 16-bit one
    shared     x, float32, contiguous, the same on all ranks bit for bit
    """

    info: TensorInfo
    parameter: nn.Parameter
    point: nn.Parameter
    shared: Tensor

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def mastered(self) -> bool:
        return self.point is not self.parameter

    def write(self, value: Tensor) -> None:
        """Set what the module computes with and what the optimizer steps."""
        for target in {self.parameter, self.point}:
            if target.data_ptr() != value.data_ptr():
                target.detach().copy_(value)

    def gradient(self) -> Tensor | None:
        """The gradient that backward computed, as a dense tensor."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            gradient = self.parameter.grad = gradient.to_dense()
        return gradient


@dataclass
class Replica:
    """One rank's model and optimizer. `buffers`: the floating ones, which ranks do not share during training."""

    model: nn.Module
    optimizer: Optimizer
    slots: list[ParameterSlot] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self.model, self.optimizer)
        inner = plain_module(self.model)
        kinds = kinds_of(inner)
        wanted = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        for name, parameter in inner.named_parameters():
            if id(parameter) in wanted:
                _check_parameter(name, parameter)
                # Contiguous in the order of the shape, whatever the memory format of the parameter is.
                shared = torch.empty(parameter.shape).copy_(parameter.detach())
                info = describe(plain(name), shared, kinds.get(name))
                point = parameter if parameter.dtype == torch.float32 else nn.Parameter(shared.clone())
                self.slots.append(ParameterSlot(info, parameter, point, shared))
        self.buffers = {plain(name): b for name, b in inner.named_buffers() if b.is_floating_point()}

    def prepare(self) -> None:
        """Start from the current parameters, equal on all ranks by now. DDP sends nothing from here on."""
        for slot in self.slots:
            slot.shared.copy_(slot.parameter.detach())
            slot.point.detach().copy_(slot.shared)
        masters = {id(slot.parameter): slot.point for slot in self.slots if slot.mastered}
        for group in self.optimizer.param_groups:
            group["params"] = [masters.get(id(p), p) for p in group["params"]]
        silence(self.model)

    def options(self) -> list[dict[str, Any]]:
        """The options of each slot's parameter group, as they are now."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        return [groups[id(slot.point)] for slot in self.slots]

    def everything(self) -> Iterator[Tensor]:
        """All that must be equal on all ranks at the start: parameters and buffers, frozen ones included."""
        yield from (parameter.detach() for parameter in self.model.parameters())
        yield from self.model.buffers()

    def refuse_new_parameters(self) -> None:
        """A parameter that was frozen when the ranks agreed has no place in what they exchange."""
        known = {id(slot.point) for slot in self.slots}
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in known:
                    shape = tuple(parameter.shape)
                    raise AttachError(
                        f"a parameter of shape {shape} has a gradient, but was frozen or absent when this LocalUpdates was "
                        "made: make a new LocalUpdates"
                    )


def make_replicas(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module | Sequence[nn.Module],
    process_group: dist.ProcessGroup | LocalWorld | None,
) -> list[Replica]:
    """The replica of this rank, or all of them in a `LocalWorld`."""
    if not isinstance(process_group, LocalWorld):
        if isinstance(optimizer, Sequence) or not isinstance(model, nn.Module):
            raise AttachError("one optimizer and one model per process; lists of them are for a LocalWorld")
        return [Replica(model, optimizer)]
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not len(optimizers) == len(models) == process_group.size:
        raise AttachError(
            f"a LocalWorld({process_group.size}) needs as many optimizers ({len(optimizers)}) and models ({len(models)})"
        )
    replicas = [Replica(m, o) for m, o in zip(models, optimizers, strict=True)]
    if any([slot.info for slot in r.slots] != [slot.info for slot in replicas[0].slots] for r in replicas):
        raise AttachError("the models of a LocalWorld differ")
    return replicas


def broadcast(replicas: Sequence[Replica], process_group: dist.ProcessGroup | LocalWorld | None) -> None:
    """All ranks begin with the weights and buffers of rank 0."""
    with torch.no_grad():
        for tensors in zip(*(replica.everything() for replica in replicas), strict=True):
            if isinstance(process_group, LocalWorld):
                for tensor in tensors[1:]:
                    tensor.copy_(tensors[0])
            else:
                whole = tensors[0].contiguous()
                dist.broadcast(whole, group=process_group, group_src=0)
                tensors[0].copy_(whole)


def detached(shared: Tensor, residual: Tensor | None, strength: float) -> Tensor:
    """shared - strength * residual, a new tensor; the same bits as the kernels give."""
    return shared.clone() if residual is None else shared - strength * residual


def plain_module(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and DDP."""
    inner = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def silence(model: nn.Module) -> None:
    """Keep every DDP around or inside `model` from averaging gradients: updates are what ranks exchange here.

    A DDP that wraps the model without being given here is found when it calls the model.
    """
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for module in found:
        _silence(module)
    if not found:
        model.register_forward_pre_hook(_silence_caller)


def _silence_caller(module: nn.Module, inputs: Any) -> None:
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is not None:
        _silence(ddp)


def _silence(ddp: DistributedDataParallel) -> None:
    # What `no_sync()` sets for a while. The first also keeps DDP's reducer asleep, the second its broadcast of buffers.
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False


def _check(model: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise AttachError(f"LocalUpdates needs a torch optimizer, not {type(optimizer).__name__}")
    if not isinstance(model, nn.Module):
        raise AttachError(f"LocalUpdates needs the model as a second argument, not {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and (method := attached(module)) is not None:
            raise AttachError(f"a wire with {method} is attached to this module: it exchanges gradients already")
    names = {id(p): name for name, p in model.named_parameters()}
    storages: dict[int, str] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                shape = tuple(parameter.shape)
                raise AttachError(f"the optimizer has a parameter of shape {shape} that is not in the model")
            place = parameter.untyped_storage().data_ptr()
            if parameter.numel() and storages.setdefault(place, names[id(parameter)]) != names[id(parameter)]:
                raise AttachError(
                    f"{names[id(parameter)]!r} shares its memory with {storages[place]!r}: tie the parameter"
                )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.device.type != "cpu":
        raise AttachError(f"{name!r} is on {parameter.device}: LocalUpdates takes parameters on the CPU only")
    if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise AttachError(f"{name!r} is {parameter.dtype}: local updates take float32, bfloat16 and float16")
