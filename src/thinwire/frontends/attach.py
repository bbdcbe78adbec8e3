"""From a DDP module to its wire."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..codecs import Codec
from ..engine.agree import agree, compile_kernels, problem_of
from ..engine.layout import Exclude, TensorInfo, describe, excluded, kinds_of
from ..engine.method import Method
from ..errors import AttachError
from ..log import set_up
from ..planner.plan import Plan, Quality
from ..schemes import tree
from ..schemes.world import TorchWorld, ranks_per_node
from .ddp import DDPWire, parameters_of, plain
from .lane import on
from .parts import check
from .stream import StreamWire

AUTO = "auto"

_wires: weakref.WeakKeyDictionary[DistributedDataParallel, DDPWire] = weakref.WeakKeyDictionary()


def attach(
    ddp: nn.Module,
    codec: Codec | str | Plan = AUTO,
    *,
    quality: Quality = "high",
    plan_file: str | Path | None = None,
    chain: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
) -> DDPWire:
    """Exchange the gradients of a DDP module. A collective: every rank calls it alike.

    ddp           a DistributedDataParallel, or what `torch.compile` made of one
    codec         "auto": measure the job, choose what is fastest, and check that it is (`docs/auto.md`); or a codec, its text
                  (`"topk(density=0.01)"`, `"topk(density=0.01) via B"`), or a plan
    quality       what auto may choose from: "lossless" (nothing that rounds), "high" (codecs that send at least 6 % of what
                  waits in every step; `docs/accuracy.md` has what they cost a model), "fast" (everything)
    plan_file     where auto keeps what it chose for the next run; by default a file of the user's cache, "" keeps nothing
    chain         by which collectives: a leaf of the tree, by letter or notation (`docs/chains.md`)
    scaler        the GradScaler of the job, if it has one: residuals are then unscaled, and untouched by a skipped step
    exclude       shell patterns on parameter names, or a function of the name: these tensors travel dense
    min_elements  tensors with fewer elements travel dense
    timeout       of our collectives; the default is that of the module's process group

    With a codec, training begins dense and goes over to it when DDP's buckets are final (after two steps; three with
    `static_graph`, one with `find_unused_parameters`). With auto it begins as DDP alone, without any hook.

    EXPERIMENTAL: with all parameters on one CUDA device what comes back is a `StreamWire`, for dense, cast, topk and
    randomblock; auto leaves DDP alone there. See "CUDA" in `docs/guarantees.md`.
    """
    set_up()
    module = getattr(ddp, "_orig_mod", ddp)
    if not isinstance(module, DistributedDataParallel):
        raise AttachError(
            f"attach needs a DistributedDataParallel, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model)"
        )
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # it does not skip a step that is not finite
    group = module.process_group
    parameters = parameters_of(module)
    gpu = next((parameter.device for parameter in parameters.values() if parameter.is_cuda), None)
    with on(gpu):
        nodes = ranks_per_node(group)
    auto = codec == AUTO
    error: str | None = None
    tensors: list[TensorInfo] = []
    facts: dict[str, Any] = {}
    method: Method | None = None
    device = "cpu"
    try:
        if auto and chain is not None:
            raise AttachError(f"auto chooses the chains by itself: leave chain={chain!r} out, or name a codec")
        if quality not in get_args(Quality):
            raise AttachError(f"quality is one of {', '.join(get_args(Quality))}, not {quality!r}")
        method = Method.of("dense" if auto else codec, chain)
        _check(module, method, min_elements)
        device = device_of(parameters).type
        if device == "cuda":
            check_job(module, method)
        kinds = {plain(name): kind for name, kind in kinds_of(module.module).items()}
        tensors = [describe(name, p, kinds.get(name)) for name, p in parameters.items()]
        method.check(tensors, dist.get_world_size(group), nodes[0])
        facts = {
            **method.facts(),
            "device": device,
            "auto": auto and quality,
            "tensors": tensors,
            "excluded": excluded(tensors, exclude),
            "options": (min_elements, scaler is not None, module.find_unused_parameters, module.static_graph),
            "buckets": module._has_rebuilt_buckets,
        }
    except Exception as problem:  # of any kind, the user's own `exclude` included: the other ranks wait to hear of it
        error = problem_of(problem)
    with on(gpu):
        agree(group, facts, error)
    assert method is not None
    wire: DDPWire
    if device == "cuda":
        options: dict[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
        stream = stream_wire(module, method, tensors, scaler=scaler, hooks=not auto, **options)
        # It has a few methods of the ordinary wire; any other raises an AttributeError that names them.
        _wires[module] = wire = cast(DDPWire, stream)
        return wire
    for text in method.chains:
        if tree.parse(text).hierarchical and nodes[0] is None:
            raise AttachError(f"the chain {text!r} needs nodes: {nodes[1]}")
    world = TorchWorld(group, 1, timeout, *nodes)
    if auto:
        from .auto import AutoWire  # the planner loads Numba

        wire = auto_wire = AutoWire(module, world, method, tensors, scaler, exclude, min_elements)
        auto_wire.begin(quality, plan_file)
    else:
        compile_kernels(group, method)
        wire = DDPWire(module, world, method, tensors, scaler, exclude, min_elements)
        world.prepare(wire._layout([tensors]).places(wire._place()))
        wire.hook()
        wire.announce()
    wire._hooks_allowed = module is ddp
    _wires[module] = wire
    return wire


def stream_wire(
    module: DistributedDataParallel,
    method: Method,
    tensors: list[TensorInfo],
    *,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
    hooks: bool = True,
) -> StreamWire:
    """The experimental wire for parameters on a GPU, or, for tests, on the processor. A collective."""
    group = module.process_group
    with on(next(iter(parameters_of(module).values())).device):
        world = TorchWorld(group, 1, timeout, backend=dist.get_backend_config(group))
        wire = StreamWire(module, world, method, tensors, scaler, exclude, min_elements)
    if hooks:
        wire.hook()
    wire.announce()
    return wire


def attached(module: DistributedDataParallel) -> Method | None:
    """How the wire that is attached to a module exchanges, if there is one."""
    wire = _wires.get(module)
    return None if wire is None else wire.method


def _check(module: DistributedDataParallel, method: Method, min_elements: int) -> None:
    str(method)  # a codec of the user's own needs a name
    if min_elements < 0:
        raise AttachError(f"min_elements must not be negative, but is {min_elements}")
    if module in _wires:
        raise AttachError(f"a wire with {_wires[module].method} is attached to this module already")
    # A hook of the built-in kind stands only in DDP's log.
    name = module._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if module._comm_hooks:
        name = getattr(module._comm_hooks[0][0], "__qualname__", "another hook")
    if name:
        raise AttachError(f"the communication hook of this module is taken by {name}; DDP has room for one")
    for name, child in module.module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise AttachError(f"{name!r} makes sparse gradients, which thinwire cannot compress: use sparse=False")
    for name, parameter in parameters_of(module).items():
        if parameter.is_complex():
            raise AttachError(f"{name!r} is {parameter.dtype}: complex gradients are not supported")


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Where parameters are: the processor, or one GPU. Anything else is refused."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", "cuda"):
            raise AttachError(
                f"{name!r} is on {tensor.device}: there are exchanges for tensors of CPUs and CUDA devices"
            )
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise AttachError(
                f"{first[0]!r} is on {first[1]} and {name!r} on {tensor.device}: all parameters of a module must be on one "
                "device"
            )
    return first[1] if first is not None else torch.device("cpu")


def check_job(module: DistributedDataParallel, method: Method) -> None:
    """Refuse what a wire on CUDA cannot do."""
    if method.plan is not None:
        raise AttachError("plans do not run on CUDA yet; name a codec: dense, cast, topk, randomblock")
    if method.chain:
        raise AttachError(f"chains do not run on CUDA yet: leave {method.chain!r} out")
    codec = method.parts[0].codec
    check(codec)
    if codec.keeps_residual and module.find_unused_parameters:
        raise AttachError(
            f"{codec} with find_unused_parameters=True does not run on CUDA yet: what a parameter that nobody used would send "
            "is lost in DDP; dense and cast can be used"
        )
