"""Measures the rate of emulated links with TCP transfers between two nodes.

Small transfers detect bursts that are too large (faster than the rate), large ones a machine that cannot keep the link busy
(slower). The rate counts whole frames: the payload is at most 1448 / 1514 = 0.956 of it.
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
LONGEST_SECONDS = 1.5  # longer transfers are omitted, except for the smallest size
SLOWEST_DUPLEX = 5_000_000  # below this rate, TCP needs more than a second to fill both directions


@dataclass(frozen=True)
class Transfer:
    """The median of several transfers of one size, one way or both ways at once."""

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
        """Whether all transfers were within 15 % of the rate. Results are marked if not."""
        return all(transfer.good for transfer in self.transfers)

    @property
    def measured(self) -> float | None:
        """Actual rate in bits per second: that of the largest one-way transfer."""
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
    """(bytes, duplex, repeats) of each round; slow links get fewer."""

    def expected(size: int) -> float:
        return 0.0 if rate is None else size * 8 / rate

    def repeats(size: int) -> int:
        return 1 if expected(size) > 0.5 else 3 if expected(size) > 0.1 else 7

    sizes = [size for size in SIZES if expected(size) <= LONGEST_SECONDS] or [SIZES[0]]
    plan = [(size, False, repeats(size)) for size in sizes]
    if rate is not None and rate < SLOWEST_DUPLEX:
        return plan
    # With traffic both ways, acknowledgements queue behind data, and slow links fill slowly.
    both = sizes[-1] if rate is None else min(SIZES[-1], max(SIZES[0], int(rate / 8)))
    return [*plan, (both, True, repeats(both))]


def calibrate(
    rate: int | None, address: str, port: int, start: Callable[[str, list[str], bool], Rank], shaped: bool
) -> Calibration:
    """Measure a link; `start(name, command, listens)` starts a probe on its node."""
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
    return judged(rate, plan, [json.loads(line) for line in result.lines[1]], shaped)


def judged(
    rate: int | None, plan: list[tuple[int, bool, int]], measured: list[list[float]], shaped: bool
) -> Calibration:
    """What the seconds of each round's transfers say of a link that should have this rate."""
    transfers = []
    for (size, both, _), times in zip(plan, measured, strict=True):
        seconds = statistics.median(times)
        bits = size * 8 / seconds
        ratio = None if rate is None else bits / rate
        good = ratio is None or (shaped and abs(ratio - 1) <= TOLERANCE)
        transfers.append(Transfer(size, both, seconds, bits, ratio, good))
    return Calibration(rate, transfers)
