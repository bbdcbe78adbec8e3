"""Costs of chains on GPUs, for many tensor sizes at once; the formulas are derived in docs/methods/espresso.md.

p ranks in the scope, m bytes per rank, B bytes per second, a the latency of one round:

    all-reduce          2 (p - 1) a + 2 (p - 1) / p m / B      ring
    reduce-scatter      (p - 1) a + (p - 1) / p m / B          ring
    all-to-all          (p - 1) a + (p - 1) / p m / B
    all-gather          (p - 1) a + (p - 1) m / B              ring, m contributed by each
    reduce, broadcast   the minimum of (p - 1) a + m / B and ceil(log2 p) (a + m / B)
    gather              (p - 1) a + (p - 1) m / B              into the root

Between machines, the k GPUs of a machine share its network card, B = card / k, unless only the first of them sends. A flat
ring crosses each card once; in a flat all-to-all, all k GPUs send through it.

Codec times are the published ones for up to 2^20 elements and proportional above. Decoding q messages takes a fixed time
plus a time proportional to q. On the CPU, a codec pair processes 20 Gbit/s of uncompressed data, as in the paper's planner.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..chains.tree import Leaf, Op
from ..kernels.cpu._jit import Doubles, Offsets, kernel
from .network import Network

FLOOR_ELEMENTS = 2.0**20
CPU_BYTES_PER_SECOND = 20e9 / 8


@dataclass(frozen=True, slots=True)
class GpuCodec:
    """A codec with its times on a GPU.

    name              as the user wrote it; codec: the text of the equivalent thinwire codec, empty if there is none
    encode, decode    seconds for up to 2^20 elements; decode for `messages` messages
    by_message        the fraction of decode that is proportional to the number of messages
    summed            whether payloads can be added without decoding
    """

    name: str
    codec: str
    encode: float
    decode: float
    by_message: float
    bytes_per_element: float
    bytes_fixed: float
    summed: bool
    messages: int

    def numbers(self) -> Doubles:
        pair = self.encode + self.decode
        return np.array(
            [
                self.encode,
                self.decode,
                self.by_message,
                self.bytes_per_element,
                self.bytes_fixed,
                self.messages,
                4.0 * self.encode / pair / CPU_BYTES_PER_SECOND,
                4.0 * self.decode / pair / CPU_BYTES_PER_SECOND,
            ]
        )


COMP, DEC, AR, RS, A2A, AG, REDUCE, GATHER, BROADCAST = range(9)
_CODES = {
    "comp": COMP,
    "dec": DEC,
    "AR": AR,
    "RS": RS,
    "A2A": A2A,
    "AG": AG,
    "R": REDUCE,
    "G": GATHER,
    "B": BROADCAST,
}
_SCOPES = {"flat": 0, "intra": 1, "inter": 2}
MOST_OPS = 12


def program(leaf: Leaf) -> NDArray[np.int8]:
    """A leaf as numbers [operations, 3]: operation, scope or device (1: CPU), whether it carries messages.

    An all-gather that does not end a pair has a 2 in the last column.
    """
    rows: list[tuple[int, int, int]] = []
    opened: list[str] = []
    for op in leaf.ops:
        if op.scope is None:
            rows.append((_CODES[op.routine], int(op.device == "cpu"), 0))
            continue
        carries = int(op.compressed)
        if op.first:
            opened.append(op.scope)
        elif op.routine in ("AG", "B"):
            if opened and opened[-1] == op.scope:
                opened.pop()
            else:
                carries = 2
        rows.append((_CODES[op.routine], _SCOPES[op.scope], carries))
    return np.array(rows, np.int8)


def programs(leaves: list[Leaf]) -> tuple[NDArray[np.int8], Offsets]:
    found = np.zeros((len(leaves), MOST_OPS, 3), np.int8)
    for index, leaf in enumerate(leaves):
        found[index, : len(leaf.ops)] = program(leaf)
    return found, np.array([len(leaf.ops) for leaf in leaves], np.int64)


def network_numbers(network: Network) -> Doubles:
    return np.array(
        [
            network.nodes,
            network.gpus,
            network.intra,
            network.inter,
            network.intra_latency,
            network.inter_latency,
        ]
    )


def durations(leaf: Leaf, elements: float, codec: GpuCodec | None, network: Network) -> list[tuple[Op, float]]:
    """The operations of a leaf with their seconds; `vectors` sums these."""
    numbers = codec.numbers() if codec is not None else np.zeros(8)
    out = np.zeros(MOST_OPS)
    _walk(program(leaf), len(leaf.ops), float(elements), numbers, network_numbers(network), out)
    return list(zip(leaf.ops, out.tolist(), strict=False))


def vectors(
    codes: NDArray[np.int8], lengths: Offsets, sizes: Doubles, codec: GpuCodec | None, network: Network
) -> Doubles:
    """[leaves, sizes, 4]: seconds of codec work before the first collective on the GPU, the same on the CPU, of all codec work
    on the GPU, and of everything from the first collective on (collectives and codec work in sequence)."""
    out = np.zeros((len(lengths), len(sizes), 4))
    numbers = codec.numbers() if codec is not None else np.zeros(8)
    _vectors(codes, lengths, np.asarray(sizes, np.float64), numbers, network_numbers(network), out)
    return out


@kernel
def _walk(codes, length, elements, codec, network, out):  # type: ignore[no-untyped-def]
    """Seconds of each operation into out. The state is e elements per rank and q messages of each (0: a tensor)."""
    encode, decode, by_message, per_element, fixed, reference, encode_cpu, decode_cpu = codec
    nodes, gpus, intra, inter, latency_intra, latency_inter = network
    e, q, speakers = elements, 0.0, gpus
    for at in range(length):
        what, scope, carries = codes[at, 0], codes[at, 1], codes[at, 2]
        if what == COMP:
            out[at] = encode * max(1.0, e / FLOOR_ELEMENTS)
            if scope == 1:
                out[at] = max(encode, encode_cpu * e)
            q = 1.0
            continue
        if what == DEC:  # decompress and add
            share = 1.0 - by_message + by_message * q / reference
            out[at] = decode * max(1.0, e / FLOOR_ELEMENTS) * share
            if scope == 1:
                out[at] = max(decode, decode_cpu * e) * share
            q = 0.0
            continue
        if scope == 0:
            p, rate = nodes * gpus, min(intra, inter) if nodes > 1 else intra
            latency = latency_inter if nodes > 1 else latency_intra
        elif scope == 1:
            p, rate, latency = gpus, intra, latency_intra
        else:
            p, rate, latency = nodes, inter / speakers, latency_inter
        size = q * (per_element * e + fixed) if carries else 4.0 * e
        steps = (p - 1.0) * latency
        seconds = 0.0
        if p > 1:
            if what == AR:
                seconds = 2.0 * steps + 2.0 * (p - 1.0) / p * size / rate
            elif what == RS or (what == A2A and (scope > 0 or nodes == 1)):
                seconds = steps + (p - 1.0) / p * size / rate
            elif what == A2A:  # flat all-to-all: traffic that leaves a machine shares its card
                across = gpus * (p - gpus) / p * size / inter
                seconds = steps + max(across, (gpus - 1.0) / p * size / intra)
            elif what in (AG, GATHER):
                seconds = steps + (p - 1.0) * size / rate
            else:  # reduce, broadcast
                seconds = min(steps + size / rate, np.ceil(np.log2(p)) * (latency + size / rate))
        out[at] = seconds
        if what in (RS, A2A):
            e, q = e / p, q * p
        elif what == GATHER:
            q = q * p
        elif what == AG:
            if carries == 2:
                q = q * p
            else:
                e = e * p
        if scope == 1:
            if what in (REDUCE, GATHER):
                speakers = 1.0
            elif what in (RS, A2A):
                speakers = gpus


@kernel
def _vectors(codes, lengths, sizes, codec, network, out):  # type: ignore[no-untyped-def]
    seconds = np.zeros(codes.shape[1])
    for leaf in range(codes.shape[0]):
        for index in range(sizes.shape[0]):
            _walk(codes[leaf], lengths[leaf], sizes[index], codec, network, seconds)
            before = True
            for at in range(lengths[leaf]):
                work = codes[leaf, at, 0] in (COMP, DEC)
                before = before and work
                on_gpu = work and codes[leaf, at, 1] == 0
                if on_gpu:
                    out[leaf, index, 2] += seconds[at]
                if not before:
                    out[leaf, index, 3] += seconds[at]
                elif on_gpu:
                    out[leaf, index, 0] += seconds[at]
                else:
                    out[leaf, index, 1] += seconds[at]
