"""Runs a leaf of the tree for one group on one rank.

Intermediate tensors hold sums of gradients; the last operation that adds divides by the number of ranks. So the residual of a
Comp is part of the sum over all ranks: `ResidualPart.weight` is 1, or one over the number of nodes where all hold the same,
and the weighted sum of all residuals on all ranks is what has not been sent yet.

*Not finite.* Messages carry a flag in their header; between messages a tensor of NaNs carries it, which the next Comp detects.
Every leaf ends with a collective that brings every part to every rank, so all ranks see it.

*Void steps.* The first Comp puts back what it sent, as without a chain. Later Comps only saw what was put back there: their
residuals are restored from a copy taken before the step.

*Capacities.* Messages of one Comp have the same length on all ranks that exchange them. In an all-gather each rank reads all
headers. In an all-to-all or a gather it does not: there the second step of the pair also carries the largest `wanted` that a
rank has seen, four bytes for each such Comp (`Stage.note`), so that all ranks that messages of a Comp can reach agree.
"""

import dataclasses
import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ..codecs import Codec, CodecState, GatheredCodec, GroupInfo, Int8, parse
from ..codecs.driver import Capacity, CodecDriver, ResidualPart
from ..comm.collectives import Collective, Place, Scope
from ..errors import ChainError, ExchangeError
from ..messages import HEADER_BYTES
from . import allgather, allreduce, alltoall, broadcast, gather, offload, reduce, reducescatter, tree
from .partition import Partition, Range
from .runtime import NAN, ChainRuntime, Piece, Position, Stage, idle
from .tree import Leaf

STEPS = {
    ("AR", False): allreduce.on_tensor,
    ("RS", False): reducescatter.on_tensor,
    ("AG", False): allgather.on_tensor,
    ("R", False): reduce.on_tensor,
    ("B", False): broadcast.on_tensor,
    ("A2A", True): alltoall.on_messages,
    ("AG", True): allgather.on_messages,
    ("G", True): gather.on_messages,
    ("B", True): broadcast.on_messages,
}
_ADDS = ("AR", "RS", "R", "dec")


class Chain:
    """One leaf for one group on one rank. `run` is a generator of collectives."""

    def __init__(
        self,
        leaf: Leaf,
        codec: Codec,
        info: GroupInfo,
        place: Place,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        check(leaf, codec)
        if leaf.hierarchical and place.ranks_per_node is None:
            raise ChainError(f"{leaf} needs to know the nodes, which are unknown")
        self.leaf, self.now, self.info, self.place = leaf, codec, info, place
        self.positions: list[Position] = []
        self.stages = self._plan()
        self.rounds = len(places(leaf, codec, place))
        adding = [stage for stage in self.stages if stage.op.routine in _ADDS]
        self._divides = adding[-1].number
        talk = next((p.talk for p in self.positions if p.talk is not None), None)
        self._scale = (talk.world if talk is not None else 1) / place.size
        # A single finite message decodes to finite values; sums of several may overflow, and tensors may hold anything.
        last = self.stages[-1]
        self.tests_result = last.op.routine != "dec" or last.before.sources != 1
        self.offload = offload.make(device, leaf)
        self._readers: dict[tuple[int, int], CodecState] = {}
        self._memory: dict[tuple[int, str], Tensor] = {}
        self.bytes = 0
        self.gathered = 0
        self.traffic: dict[Scope, float] = {}

    # -- planning ------------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Stage]:
        ops, place = self.leaf.ops, self.place
        shape = Partition(Range(0, self.info.elements, self.info.elements))
        stages: list[Stage] = []
        position, reported, scattered = -1, list[int](), False
        cuts: list[int] = []  # counts of the open first steps; 1 where a root holds everything
        for number, op in enumerate(ops):
            before, note = shape, tuple[int, ...]()
            if op.routine == "comp":
                # Data that a later step divides is compressed as several messages.
                splits, scattered = list[int](), False
                for later in ops[number + 1 :]:
                    if later.routine == "dec":
                        break
                    assert later.scope is not None
                    scattered |= later.first
                    if later.divides:
                        splits.append(place.count(later.scope))
                position += 1
                shape = dataclasses.replace(shape, splits=tuple(splits), sources=1)
                counts = tuple(cuts + splits)
                self._add_position(before, shape, counts, ops[number + 1].scope if self.leaf.summed else None)
            elif op.routine == "dec":
                shape = dataclasses.replace(shape, splits=(), sources=0)
                if scattered:
                    reported.append(position)
            else:
                shape = shape.after(op, place)
                if op.first:
                    assert op.scope is not None
                    cuts.append(place.count(op.scope) if op.divides else 1)
                elif len(shape.outer) < len(cuts):
                    cuts.pop()
                note = tuple(reported) if op.routine in ("AG", "B") else ()
            stages.append(Stage(number, op, before, shape, place, position, note, number == len(ops) - 1))
        return stages

    def _add_position(self, before: Partition, after: Partition, counts: tuple[int, ...], scope: Scope | None) -> None:
        place, kept, codec = self.place, before.range if before.holder else Range(0, 0, 0), self.now
        # All nodes compress the same data here and must select the same: codecs may draw by rank.
        rank, weight = place.rank, 1.0
        if not before.nodes and place.ranks_per_node is not None:
            rank, weight = place.index("intra"), 1.0 / place.count("inter")
        residual = ResidualPart(kept.start, kept.stop, weight)
        if scope is not None:
            info = kept.info(self.info)
            world, index = place.count(scope), place.index(scope)
            talk = CodecDriver(info, codec, index, world, scope)
            self.positions.append(Position(kept, residual, [Piece(kept, talk.state)], 1, None, talk))
            return
        # Of all ranks, because messages between them have equal lengths.
        whole = Range(0, self.info.elements, self.info.elements)
        infos = [piece.info(self.info) for piece in whole.parts(counts)]
        pieces = []
        if before.holder:
            for piece in after.pieces:
                pieces.append(Piece(piece, codec.start(piece.info(self.info), rank, place.size)))
        capacity = Capacity.of(codec, infos, place.size)
        self.positions.append(Position(kept, residual, pieces, math.prod(after.splits), capacity))

    def use(self, now: Codec) -> None:
        """Compress with these parameters of the codec from now on."""
        self.now = now
        for position in self.positions:
            if position.talk is not None:
                position.talk.now = now

    @property
    def residual_parts(self) -> list[ResidualPart]:
        """Residuals of this rank, one per Comp; none for a codec without residual."""
        return [position.residual for position in self.positions] if self.now.keeps_residual else []

    @property
    def folds(self) -> bool:
        """Whether the first Comp sees the whole gradient of this rank, so that its residual can absorb any remainder."""
        return bool(self.residual_parts) and self.leaf.ops[0].routine == "comp"

    # -- one step ------------------------------------------------------------------------------------------------------

    def run(
        self, gradient: Tensor, residuals: Sequence[Tensor], step: int, riders: Tensor | None = None
    ) -> Generator[Collective, None, bool]:
        """Exchange: gradient float32 [elements] holds the mean afterwards. Returns False if a message was not finite.

        `riders` is empty: nothing rides in a chain.
        """
        runtime = ChainRuntime(gradient, gradient, wanted=[-1] * len(self.positions), memory=self._memory)
        self.bytes = self.gathered = 0
        self.traffic = {}
        for stage in self.stages:
            op, scale = stage.op, self._scale if stage.number == self._divides else 1.0
            if op.routine == "comp":
                if not self.leaf.summed:
                    self._compress(runtime, stage, residuals, step)
                continue
            if op.routine == "dec":
                if not self.leaf.summed:
                    self._decompress(runtime, stage, scale)
                    continue
            elif self.leaf.summed and op.compressed:
                yield from self._drive(runtime, stage, residuals, step)
                continue
            else:
                if stage.count > 1:
                    carry_out = STEPS[op.routine, op.compressed] if stage.takes_part else idle
                    for part in carry_out(runtime, stage):
                        self._count(part, stage)
                        yield part
                if runtime.messages is not None:
                    runtime.read_headers(stage.position)
            if scale != 1.0 and runtime.tensor is not None and op.routine in _ADDS:
                runtime.tensor.mul_(scale)
        assert runtime.tensor is not None
        if runtime.tensor.data_ptr() != gradient.data_ptr():
            gradient.copy_(runtime.tensor[: gradient.numel()])
        for position, wanted in zip(self.positions, runtime.wanted, strict=True):
            position.wanted = wanted
        return runtime.finite

    def _count(self, part: Collective, stage: Stage) -> None:
        self.bytes += part.bytes
        if part.operation != "idle":
            self.traffic[stage.scope] = self.traffic.get(stage.scope, 0.0) + part.traffic(stage.count)
        if part.operation == "gather":
            self.gathered += part.bytes

    def _compress(self, runtime: ChainRuntime, stage: Stage, residuals: Sequence[Tensor], step: int) -> None:
        position = self.positions[stage.position]
        assert position.capacity is not None
        runtime.capacity = position.capacity.value
        if not stage.before.holder:
            return
        assert runtime.tensor is not None
        messages = position.make_room()
        tensor = self.offload.fetch(runtime.tensor[: position.range.elements], f"tensor {stage.number}")
        self.offload.work(lambda: self._encode(tensor, residuals[stage.position], position, step, runtime.capacity))
        runtime.tensor, runtime.messages = None, self.offload.send(messages, f"messages {stage.number}")
        runtime.read_headers(stage.position)

    def _encode(self, tensor: Tensor, residual: Tensor, position: Position, step: int, capacity: int) -> None:
        assert isinstance(self.now, GatheredCodec)
        position.entries = 0
        for piece in position.pieces:
            place = slice(piece.range.start - position.range.start, piece.range.stop - position.range.start)
            if place.start >= place.stop:
                piece.state.outgoing[:HEADER_BYTES] = 0
                continue
            piece.state.step = step
            message = self.now.encode(tensor[place], residual[place], piece.state)
            if message.size > capacity:
                raise ExchangeError(f"{self.now} wrote a message of {message.size} bytes where {capacity} were agreed")
            position.entries += int(piece.state.outgoing[:HEADER_BYTES].numpy().view("<u4")[1])

    def _decompress(self, runtime: ChainRuntime, stage: Stage, scale: float) -> None:
        shape = stage.before
        if not shape.holder:
            return
        assert runtime.messages is not None
        own = runtime.result_room(stage, shape.range.size)
        out = self.offload.room(own.numel(), f"result {stage.number}", own)
        messages = self.offload.fetch(runtime.messages, f"received {stage.number}")
        self.offload.work(lambda: self._decode(messages, out, stage, scale, runtime.finite))
        runtime.tensor, runtime.messages = self.offload.send(out, f"result {stage.number}", own), None

    def _decode(self, messages: Tensor, out: Tensor, stage: Stage, scale: float, finite: bool) -> None:
        assert isinstance(self.now, GatheredCodec)
        shape = stage.before
        out[shape.range.elements :] = 0.0
        if not finite:
            out[: shape.range.elements] = NAN
            return
        for number, piece in enumerate(stage.pieces):
            if piece.elements:
                place = slice(piece.start - shape.range.start, piece.stop - shape.range.start)
                state = self._reader(stage.position, piece)
                self.now.write(list(messages[:, number].unbind()), out[place], scale, state)

    def _reader(self, position: int, piece: Range) -> CodecState:
        """A codec state for decoding messages of these elements."""
        for own in self.positions[position].pieces:
            if own.range == piece:
                return own.state
        key = (piece.start, piece.stop)
        if key not in self._readers:
            self._readers[key] = self.now.start(piece.info(self.info), self.place.rank, self.place.size)
        return self._readers[key]

    def _drive(
        self, runtime: ChainRuntime, stage: Stage, residuals: Sequence[Tensor], step: int
    ) -> Generator[Collective, None, None]:
        """The codec's own rounds, from `comp` to `dec`; the result is a mean over the scope."""
        position = self.positions[stage.position]
        talk, issued = position.talk, 0
        assert talk is not None
        if stage.before.holder:
            assert runtime.tensor is not None
            own = residuals[stage.position : stage.position + 1]
            gradient = runtime.tensor[: position.range.elements]
            steps = talk.run(gradient, own, step)
            while True:
                try:
                    part = next(steps)
                except StopIteration as end:
                    runtime.finite &= end.value
                    break
                issued += 1
                self._count(part, stage)
                yield part
            position.entries = talk.entries
            if not runtime.finite:
                gradient.fill_(NAN)
        # All ranks take the same number of rounds, even if a codec stops early.
        for _ in range(self.now.rounds - issued):
            yield from idle(runtime, stage)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def undo(self, residuals: Sequence[Tensor]) -> None:
        """Return to the first residual what its Comp took out of it."""
        if not residuals:
            return
        position = self.positions[0]
        for piece in position.pieces:
            place = slice(piece.range.start - position.range.start, piece.range.stop - position.range.start)
            if place.start < place.stop:
                self.now.undo(residuals[0][place], piece.state)

    def observe(self) -> None:
        """The step is valid: adapt capacities to what was wanted."""
        for position in self.positions:
            capacity, wanted = position.capacity, position.wanted
            if position.talk is not None:
                capacity, wanted = position.talk.capacity, position.talk.wanted
            if capacity is not None and wanted >= 0:
                capacity.observe(wanted)

    @property
    def states(self) -> list[CodecState]:
        return [piece.state for position in self.positions for piece in position.pieces if piece.range.elements]

    @property
    def entries(self) -> int:
        return sum(position.entries for position in self.positions)

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._memory.values()) + sum(
            position.buffer.numel() for position in self.positions
        )


def exchanger(codec: Codec, leaf: Leaf | None, info: GroupInfo, place: Place) -> CodecDriver | Chain:
    """What exchanges a group on one rank: its codec by itself, or a chain."""
    if leaf is None:
        return CodecDriver(info, codec, place.rank, place.size)
    return Chain(leaf, codec, info, place)


def places(leaf: Leaf | None, codec: Codec, place: Place) -> list[tuple[int, Scope]]:
    """Round and scope of each collective of a chain, or of a codec by itself."""
    if leaf is None:
        return [(round_, "flat") for round_ in range(codec.rounds)]
    scopes: list[Scope] = []
    for op in leaf.ops:
        if op.scope is not None and op.compressed and leaf.summed:
            scopes += [op.scope] * codec.rounds
        elif op.scope is not None and place.count(op.scope) > 1:
            scopes.append(op.scope)
    return list(enumerate(scopes))


DEFAULTS: dict[type[Codec], str] = {Int8: "K"}
"""Default chains of codecs whose own collectives are not the best choice."""


def choose(codec: Codec | str, chain: str | None = None) -> tuple[Codec, str]:
    """A codec and the notation of its chain, empty for the codec's own collectives.

    The text may name the chain: `"topk(density=0.01) via B"`.
    """
    if isinstance(codec, str):
        text, _, via = codec.partition(" via ")
        if via and chain:
            raise ChainError(f"{codec!r} names a chain already, and {chain!r} is given as well")
        codec, chain = parse(text), chain or via or None
    if not isinstance(codec, Codec):
        raise ChainError(f"{codec!r} is not a codec: give thinwire.TopK(0.01), or a text such as 'topk(density=0.01)'")
    own = "fAR" if codec.direct else "comp fAGc dec" if isinstance(codec, GatheredCodec) else "comp fARc dec"
    leaf = tree.parse(chain or DEFAULTS.get(type(codec), own))
    check(leaf, codec)
    return codec, "" if str(leaf) == own else str(leaf)


def check(leaf: Leaf, codec: Codec) -> None:
    """Raise ChainError for a leaf that a codec cannot run."""
    if not leaf.compressions:
        if not codec.direct:
            raise ChainError(f"{leaf} compresses nothing, so {codec} has no place in it; it is a chain of 'dense'")
    elif codec.direct:
        raise ChainError(f"{leaf} compresses, which {codec} does not; 'fAR', 'iRS eAR iAG' do without")
    elif leaf.summed and isinstance(codec, GatheredCodec):
        raise ChainError(
            f"{leaf} adds messages on their way, which those of {codec} do not allow; 'comp fAGc dec' gathers"
        )
    elif not leaf.summed and not isinstance(codec, GatheredCodec):
        raise ChainError(
            f"{leaf} sends messages; {codec} sums payloads, as in 'comp fARc dec', 'iRS comp eARc dec iAG'"
        )
