"""Attach a wire to a DistributedDataParallel module: check the job on all ranks, then register the hook."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..chains import tree
from ..codecs import Codec
from ..comm.world import TorchWorld, ranks_per_node
from ..engine.consensus import agree, problem_of
from ..engine.ddp_module import attached, parameters_of, plain, remember
from ..engine.layout import Exclude, TensorInfo, describe, excluded, kinds_of
from ..engine.rank_state import Safety
from ..engine.session import Job, Session
from ..engine.strategy import Strategy
from ..engine.warmup import compile_kernels
from ..errors import AttachError
from ..experimental.lane import on
from ..experimental.parts import check
from ..experimental.stream import StreamWire
from ..log import logger, set_up
from ..planner.plan import Plan, Quality
from .wire import DDPWire, announce

AUTO = "auto"


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
) -> DDPWire | StreamWire:
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
    strategy: Strategy | None = None
    device = "cpu"
    try:
        if auto and chain is not None:
            raise AttachError(f"auto chooses the chains by itself: leave chain={chain!r} out, or name a codec")
        if quality not in get_args(Quality):
            raise AttachError(f"quality is one of {', '.join(get_args(Quality))}, not {quality!r}")
        strategy = Strategy.of("dense" if auto else codec, chain)
        _check(module, strategy, min_elements)
        device = device_of(parameters).type
        if device == "cuda":
            check_job(module, strategy)
        kinds = {plain(name): kind for name, kind in kinds_of(module.module).items()}
        tensors = [describe(name, p, kinds.get(name)) for name, p in parameters.items()]
        strategy.check(tensors, dist.get_world_size(group), nodes[0])
        facts = {
            **strategy.facts(),
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
    assert strategy is not None
    if device == "cuda":
        options: dict[str, Any] = {"exclude": exclude, "min_elements": min_elements, "timeout": timeout}
        stream = stream_wire(module, strategy, tensors, scaler=scaler, hooks=not auto, **options)
        remember(module, stream)
        return stream
    for text in strategy.chains:
        if tree.parse(text).hierarchical and nodes[0] is None:
            raise AttachError(f"the chain {text!r} needs nodes: {nodes[1]}")
    world = TorchWorld(group, 1, timeout, *nodes)
    if not auto:
        compile_kernels(group, strategy)
    tracks_unused = module.find_unused_parameters or module.static_graph
    safety = Safety(protected=scaler is not None, tracks_unused=tracks_unused, saturates=scaler is None)
    session = Session(world, strategy, Job(tuple(tensors), exclude, min_elements), safety, scaler)
    wire = DDPWire(module, world, session, auto=auto)
    if auto:
        from ..auto.job import TunedJob  # the planner loads Numba
        from ..auto.tuner import AutoTuner

        wire.tuner = AutoTuner(TunedJob(wire, module, world, wire.hook, quality, plan_file))
        wire.hook.observer = wire.tuner.watchdog
        wire.tuner.begin()
    else:
        world.prepare(session.layout([tensors]).places(session.place))
        wire.hook.register()
        announce(wire)
    wire.compiled_as_a_whole = module is not ddp
    remember(module, wire)
    return wire


def stream_wire(
    module: DistributedDataParallel,
    strategy: Strategy,
    tensors: list[TensorInfo],
    *,
    scaler: torch.amp.GradScaler | None = None,
    exclude: Exclude = (),
    min_elements: int = 1024,
    timeout: timedelta | None = None,
    hooks: bool = True,
) -> StreamWire:
    """The experimental wire for parameters on a GPU, or, for tests, on the CPU. A collective."""
    group = module.process_group
    with on(next(iter(parameters_of(module).values())).device):
        world = TorchWorld(group, 1, timeout, backend=dist.get_backend_config(group))
        wire = StreamWire(module, world, strategy, tensors, scaler, exclude, min_elements)
    if hooks:
        wire.hook()
    if world.rank == 0:
        logger.info("%s", wire.explain())
    return wire


def _check(module: DistributedDataParallel, strategy: Strategy, min_elements: int) -> None:
    str(strategy)  # a codec of the user's own needs a name
    if min_elements < 0:
        raise AttachError(f"min_elements must not be negative, but is {min_elements}")
    if (present := attached(module)) is not None:
        raise AttachError(f"a wire with {present} is attached to this module already")
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
    """Where parameters are: the CPU, or one GPU. Anything else is refused."""
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


def check_job(module: DistributedDataParallel, strategy: Strategy) -> None:
    """Refuse what a wire on CUDA cannot do."""
    if strategy.plan is not None:
        raise AttachError("plans do not run on CUDA yet; name a codec: dense, cast, topk, randomblock")
    if strategy.chain:
        raise AttachError(f"chains do not run on CUDA yet: leave {strategy.chain!r} out")
    codec = strategy.assignments[0].codec
    check(codec)
    if codec.keeps_residual and module.find_unused_parameters:
        raise AttachError(
            f"{codec} with find_unused_parameters=True does not run on CUDA yet: what a parameter that no rank used would send "
            "is lost in DDP; dense and cast can be used"
        )
