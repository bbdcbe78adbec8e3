"""Runs a leaf of the tree for one group on one rank.

Tensors hold sums on their way, in the units of gradients; the last operation that adds divides by the number of ranks. So
what a Comp keeps is a part of the sum over all ranks: `Holding.weight` is 1, or one over the number of nodes where all of them
hold the same, and the weighted sum of all residuals on all ranks is what has not been sent yet.

*Not finite.* A message says it in its header; between messages a tensor of NaNs says it, which the next Comp finds. Every leaf
ends with a collective that brings every part to every rank, so all of them learn of it.

*Void steps.* The first Comp that a gradient meets takes back what it sent, as without a chain. Later ones saw only what was
taken back there: a copy from before the step replaces theirs.

*Capacities.* Messages of one Comp are equally long on all ranks that they meet. In an all-gather each rank reads the headers
of all. In an all-to-all or a gather it does not: the second step of that pair carries, behind what it sends anyway, the
largest `wanted` that a rank has seen, four bytes for each such Comp (`Stage.note`). Every rank that messages of a Comp can
reach then knows the same.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..codecs import Codec, CodecState, GatheredCodec, GroupInfo, Int8, parse
from ..errors import ChainError, ExchangeError
from ..messages import HEADER_BYTES
from . import allgather, allreduce, alltoall, broadcast, gather, offload, reduce, reducescatter, tree
from .collective import Collective, Place, Scope
from .conversation import Conversation, MakeRoom, Room, make_room
from .flow import NAN, Flow, Stage, idle
from .shape import Range, Shape
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


@dataclass
class Piece:
    """What one message of a Comp speaks of."""

    range: Range
    state: CodecState


@dataclass(frozen=True)
class Holding:
    """What a Comp keeps: elements [start, stop) of the group; `weight` is its share in the sum of all ranks."""

    start: int
    stop: int
    weight: float = 1.0


@dataclass
class Position:
    """One Comp of a chain: its messages on this rank, and what all ranks wanted of them."""

    range: Range
    holding: Holding
    pieces: list[Piece]
    count: int
    capacity: Room | None
    talk: Conversation | None = None
    buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wanted: int = -1
    entries: int = 0

    def make_room(self) -> Tensor:
        """Buffers for the messages of this step, uint8 [1, pieces, capacity]."""
        assert self.capacity is not None
        size = self.capacity.value
        if self.buffer.numel() < size * self.count:
            self.buffer = torch.zeros(size * self.count, dtype=torch.uint8)
        rows = self.buffer[: size * self.count].view(1, self.count, size)
        for row, piece in zip(rows[0], self.pieces, strict=True):
            piece.state.outgoing = row
        return rows


class Chain:
    """One leaf for one group on one rank. `run` is a generator of collectives, as a codec's exchange is of requests."""

    def __init__(
        self,
        leaf: Leaf,
        codec: Codec,
        info: GroupInfo,
        place: Place,
        room: MakeRoom,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        check(leaf, codec)
        if leaf.hierarchical and place.ranks_per_node is None:
            raise ChainError(f"{leaf} needs to know the nodes, and they are not known")
        self.leaf, self.now, self.info, self.place = leaf, codec, info, place
        self.positions: list[Position] = []
        self.stages = self._plan(room)
        self.rounds = len(places(leaf, codec, place))
        adding = [stage for stage in self.stages if stage.op.routine in _ADDS]
        self._divides = adding[-1].number
        talk = next((p.talk for p in self.positions if p.talk is not None), None)
        self._scale = (talk.world if talk is not None else 1) / place.size
        # A message that is finite and alone decodes to something finite; sums may overflow, and tensors hold what they hold.
        last = self.stages[-1]
        self.tests_result = last.op.routine != "dec" or last.before.sources != 1
        self.offload = offload.make(device, leaf)
        self._readers: dict[tuple[int, int], CodecState] = {}
        self._memory: dict[tuple[int, str], Tensor] = {}
        self.bytes = 0
        self.gathered = 0
        self.traffic: dict[Scope, float] = {}

    # -- planning ------------------------------------------------------------------------------------------------------

    def _plan(self, room: MakeRoom) -> list[Stage]:
        ops, place = self.leaf.ops, self.place
        shape = Shape(Range(0, self.info.elements, self.info.elements))
        stages: list[Stage] = []
        position, told, scattered = -1, list[int](), False
        cuts: list[int] = []  # of the first steps that are open; 1 where a root has everything
        for number, op in enumerate(ops):
            before, note = shape, tuple[int, ...]()
            if op.routine == "comp":
                # A message that is divided on its way was several from the start.
                splits, scattered = list[int](), False
                for later in ops[number + 1 :]:
                    if later.routine == "dec":
                        break
                    assert later.scope is not None
                    scattered |= later.first
                    if later.divides:
                        splits.append(place.count(later.scope))
                position += 1
                shape = shape.compressed(tuple(splits))
                counts = tuple(cuts + splits)
                self._add_position(before, shape, counts, ops[number + 1].scope if self.leaf.summed else None, room)
            elif op.routine == "dec":
                shape = shape.decompressed()
                if scattered:
                    told.append(position)
            else:
                shape = shape.after(op, place)
                if op.first:
                    assert op.scope is not None
                    cuts.append(place.count(op.scope) if op.divides else 1)
                elif len(shape.outer) < len(cuts):
                    cuts.pop()
                note = tuple(told) if op.routine in ("AG", "B") else ()
            stages.append(Stage(number, op, before, shape, place, position, note, number == len(ops) - 1))
        return stages

    def _add_position(
        self, before: Shape, after: Shape, counts: tuple[int, ...], scope: Scope | None, room: MakeRoom
    ) -> None:
        place, kept, codec = self.place, before.range if before.holder else Range(0, 0, 0), self.now
        # All nodes compress the same here, so they must decide the same: codecs may draw by rank.
        rank, weight = place.rank, 1.0
        if not before.nodes and place.ranks_per_node is not None:
            rank, weight = place.index("intra"), 1.0 / place.count("inter")
        holding = Holding(kept.start, kept.stop, weight)
        if scope is not None:
            info = kept.info(self.info)
            world, index = place.count(scope), place.index(scope)
            talk = Conversation(
                info,
                codec,
                codec.start(info, index, world),
                make_room(codec, [info], world, room),
                world,
                index,
                scope,
            )
            self.positions.append(Position(kept, holding, [Piece(kept, talk.state)], 1, None, talk))
            return
        # Of all ranks: they send each other messages of equal length.
        whole = Range(0, self.info.elements, self.info.elements)
        infos = [piece.info(self.info) for piece in whole.parts(counts)]
        pieces = []
        if before.holder:
            for piece in after.pieces:
                pieces.append(Piece(piece, codec.start(piece.info(self.info), rank, place.size)))
        capacity = make_room(codec, infos, place.size, room)
        self.positions.append(Position(kept, holding, pieces, math.prod(after.splits), capacity))

    def use(self, now: Codec) -> None:
        """From now on compress with these numbers of the codec."""
        self.now = now
        for position in self.positions:
            if position.talk is not None:
                position.talk.now = now

    @property
    def holdings(self) -> list[Holding]:
        """What this rank keeps, one for each Comp; none for a codec that keeps nothing."""
        return [position.holding for position in self.positions] if self.now.keeps_residual else []

    @property
    def folds(self) -> bool:
        """Whether the first Comp sees the whole gradient of this rank, so that its residual takes whatever is left over."""
        return bool(self.holdings) and self.leaf.ops[0].routine == "comp"

    # -- one step ------------------------------------------------------------------------------------------------------

    def run(self, gradient: Tensor, residuals: Sequence[Tensor], step: int) -> Generator[Collective, None, bool]:
        """Exchange: gradient float32 [elements] holds the mean afterwards. Returns False if a message said not finite."""
        flow = Flow(gradient, gradient, wanted=[-1] * len(self.positions), memory=self._memory)
        self.bytes = self.gathered = 0
        self.traffic = {}
        for stage in self.stages:
            op, scale = stage.op, self._scale if stage.number == self._divides else 1.0
            if op.routine == "comp":
                if not self.leaf.summed:
                    self._compress(flow, stage, residuals, step)
                continue
            if op.routine == "dec":
                if not self.leaf.summed:
                    self._decompress(flow, stage, scale)
                    continue
            elif self.leaf.summed and op.compressed:
                yield from self._talk(flow, stage, residuals, step)
                continue
            else:
                for part in STEPS[op.routine, op.compressed](flow, stage):
                    self._count(part, stage)
                    yield part
            if scale != 1.0 and flow.tensor is not None and op.routine in _ADDS:
                flow.tensor.mul_(scale)
        assert flow.tensor is not None
        if flow.tensor.data_ptr() != gradient.data_ptr():
            gradient.copy_(flow.tensor[: gradient.numel()])
        for position, wanted in zip(self.positions, flow.wanted, strict=True):
            position.wanted = wanted
        return flow.finite

    def _count(self, part: Collective, stage: Stage) -> None:
        self.bytes += part.bytes
        if part.operation != "idle":
            self.traffic[stage.scope] = self.traffic.get(stage.scope, 0.0) + part.traffic(stage.count)
        if part.operation == "gather":
            self.gathered += part.bytes

    def _compress(self, flow: Flow, stage: Stage, residuals: Sequence[Tensor], step: int) -> None:
        position = self.positions[stage.position]
        assert position.capacity is not None
        flow.capacity = position.capacity.value
        if not stage.before.holder:
            return
        assert flow.tensor is not None
        messages = position.make_room()
        tensor = self.offload.fetch(flow.tensor[: position.range.elements], f"tensor {stage.number}")
        self.offload.work(lambda: self._encode(tensor, residuals[stage.position], position, step, flow.capacity))
        flow.tensor, flow.messages = None, self.offload.send(messages, f"messages {stage.number}")
        flow.look(stage.position)

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

    def _decompress(self, flow: Flow, stage: Stage, scale: float) -> None:
        shape = stage.before
        if not shape.holder:
            return
        assert flow.messages is not None
        own = flow.result_room(stage, shape.range.size)
        out = self.offload.room(own.numel(), f"result {stage.number}", own)
        messages = self.offload.fetch(flow.messages, f"received {stage.number}")
        self.offload.work(lambda: self._decode(messages, out, stage, scale, flow.finite))
        flow.tensor, flow.messages = self.offload.send(out, f"result {stage.number}", own), None

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
        """A state that fits messages of these elements."""
        for own in self.positions[position].pieces:
            if own.range == piece:
                return own.state
        key = (piece.start, piece.stop)
        if key not in self._readers:
            self._readers[key] = self.now.start(piece.info(self.info), self.place.rank, self.place.size)
        return self._readers[key]

    def _talk(
        self, flow: Flow, stage: Stage, residuals: Sequence[Tensor], step: int
    ) -> Generator[Collective, None, None]:
        """The codec's own rounds, from `comp` to `dec`; its result is a mean over them."""
        position = self.positions[stage.position]
        talk, spoken = position.talk, 0
        assert talk is not None
        if stage.before.holder:
            assert flow.tensor is not None
            residual = residuals[stage.position] if residuals else torch.empty(0)
            gradient = flow.tensor[: position.range.elements]
            steps = talk.speak(gradient, residual, torch.empty(0), step)
            while True:
                try:
                    part = next(steps)
                except StopIteration as end:
                    flow.finite &= end.value
                    break
                spoken += 1
                self._count(part, stage)
                yield part
            position.entries = talk.entries
            if not flow.finite:
                gradient.fill_(NAN)
        # All ranks take the same number of rounds, whatever their codec said.
        for _ in range(self.now.rounds - spoken):
            yield from idle(stage)

    # -- the end of a step ---------------------------------------------------------------------------------------------

    def undo(self, residual: Tensor) -> None:
        """Put back what the first Comp took out of its residual."""
        position = self.positions[0]
        for piece in position.pieces:
            place = slice(piece.range.start - position.range.start, piece.range.stop - position.range.start)
            if place.start < place.stop:
                self.now.undo(residual[place], piece.state)

    def observe(self) -> None:
        """The step counts: capacities follow what was wanted."""
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


def places(leaf: Leaf, codec: Codec, place: Place) -> list[tuple[int, Scope]]:
    """Round and scope of each collective of a chain."""
    scopes: list[Scope] = []
    for op in leaf.ops:
        if op.scope is not None and op.compressed and leaf.summed:
            scopes += [op.scope] * codec.rounds
        elif op.scope is not None and place.count(op.scope) > 1:
            scopes.append(op.scope)
    return list(enumerate(scopes))


DEFAULTS: dict[type[Codec], str] = {Int8: "K"}
"""Chains of codecs for which their own collectives are not the best over all ranks."""


def choose(codec: Codec | str, chain: str | None = None) -> tuple[Codec, str]:
    """A codec and the notation of its chain, empty where that is what the codec does by itself.

    The text of a codec may name the chain: `"topk(density=0.01) via B"`.
    """
    if isinstance(codec, str):
        text, _, via = codec.partition(" via ")
        if via and chain:
            raise ChainError(f"{codec!r} has a chain already, and {chain!r} is given beside it")
        codec, chain = parse(text), chain or via or None
    if not isinstance(codec, Codec):
        raise ChainError(f"{codec!r} is not a codec: give thinwire.TopK(0.01), or a text such as 'topk(density=0.01)'")
    own = "fAR" if codec.direct else "comp fAGc dec" if isinstance(codec, GatheredCodec) else "comp fARc dec"
    leaf = tree.parse(chain or DEFAULTS.get(type(codec), own))
    check(leaf, codec)
    return codec, "" if str(leaf) == own else str(leaf)


def check(leaf: Leaf, codec: Codec) -> None:
    """Refuse a leaf that a codec cannot run."""
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
