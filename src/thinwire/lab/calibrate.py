"""Does a link have the rate it should? Real TCP transfers between two nodes say so.

Small transfers find a burst that is too large (they pass faster than the rate), large ones a link that the machine
cannot keep busy (they pass slower). The rate counts whole frames: what arrives is at best 1448 / 1514 = 0.956 of it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .launch import Job, Rank
from .netns import LabError, format_rate

SIZES = (64 << 10, 256 << 10, 4 << 20)
TOLERANCE = 0.15
LONGEST_SECONDS = 1.5  # a transfer that would take longer is left out, except for the smallest
SLOWEST_DUPLEX = 5_000_000  # below, TCP needs longer than a second to fill both directions, on any network


@dataclass(frozen=True)
class Transfer:
    """The median of a few transfers of one size, from node to node or both ways at once."""

    bytes: int
    duplex: bool
    seconds: float
    bits_per_second: float
    ratio: float | None  # to the rate of the link; None if it has none
    good: bool


@dataclass(frozen=True)
class Calibration:
    rate: int | None
    transfers: list[Transfer]

    @property
    def good(self) -> bool:
        """Whether every transfer came within 15 % of the rate. Results of a run where it is false are to be marked."""
        return all(transfer.good for transfer in self.transfers)

    @property
    def measured(self) -> float | None:
        """Bits a second of the largest one-way transfer: the rate that the link really has."""
        one_way = [transfer for transfer in self.transfers if not transfer.duplex]
        return one_way[-1].bits_per_second if one_way else None

    def __str__(self) -> str:
        if not self.transfers:
            return "no link to measure: one node"
        parts = []
        for transfer in self.transfers:
            name = f"{transfer.bytes >> 10} KB{' both ways' if transfer.duplex else ''}"
            ratio = "" if transfer.ratio is None else f" ({transfer.ratio:.2f}{'' if transfer.good else ', off'})"
            parts.append(f"{name} {format_rate(transfer.bits_per_second)}{ratio}")
        return f"rate {format_rate(self.rate)}, measured: " + ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        transfers = [asdict(transfer) for transfer in self.transfers]
        return {"rate": self.rate, "measured": self.measured, "good": self.good, "transfers": transfers}


def rounds(rate: int | None) -> list[tuple[int, bool, int]]:
    """(bytes, duplex, repeats) of each round; for slow links those that do not take minutes."""

    def expected(size: int) -> float:
        return 0.0 if rate is None else size * 8 / rate

    def repeats(size: int) -> int:
        return 1 if expected(size) > 0.5 else 3 if expected(size) > 0.1 else 7

    sizes = [size for size in SIZES if expected(size) <= LONGEST_SECONDS] or [SIZES[0]]
    plan = [(size, False, repeats(size)) for size in sizes]
    if rate is not None and rate < SLOWEST_DUPLEX:
        return plan
    # Both ways, acknowledgements queue behind data: it takes a while until a slow link is busy.
    both = sizes[-1] if rate is None else min(SIZES[-1], max(SIZES[0], int(rate / 8)))
    return [*plan, (both, True, repeats(both))]


def calibrate(
    rate: int | None, address: str, port: int, start: Callable[[str, list[str], bool], Rank], shaped: bool
) -> Calibration:
    """Measures; `start(name, command, listens)` says how a probe is started on its node."""
    plan = rounds(rate)
    probe = [sys.executable, "-I", "-S", str(Path(__file__).with_name("probe.py"))]
    ends = [
        start(role, [*probe, role, address, str(port), json.dumps(plan)], role == "listen")
        for role in ("listen", "connect")
    ]
    result = Job(ends, on_line=lambda rank, line: None).wait(timeout=120)
    if result.code:
        said = " / ".join(line for lines in result.lines for line in lines[-2:])
        raise LabError(f"calibration failed with code {result.code}: {said or 'no answer in 120 s'}")
    transfers = []
    for (size, both, _), line in zip(plan, result.lines[1], strict=True):
        seconds = statistics.median(json.loads(line))
        bits = size * 8 / seconds
        ratio = None if rate is None else bits / rate
        good = ratio is None or (shaped and abs(ratio - 1) <= TOLERANCE)
        transfers.append(Transfer(size, both, seconds, bits, ratio, good))
    return Calibration(rate, transfers)
