"""What the exchanges did: bytes, times, density, per group and in all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..schemes.collective import Scope
from .layout import Layout
from .member import Member
from .pipeline import Timing


@dataclass
class GroupStatistics:
    """Sums over all steps of one group. Seconds of `wire` run from the issue of a collective to its end, waits for
    slower ranks included: the rank that waits least is the one that the others wait for. `traffic` are bytes that the
    collectives put on the link of a rank, by scope."""

    name: str
    codec: str
    elements: int
    bytes: int = 0
    gathered_bytes: int = 0
    traffic: dict[Scope, float] = field(default_factory=dict)
    entries: int = 0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0

    def to_dict(self, steps: int) -> dict[str, Any]:
        each = max(steps, 1)
        return {
            "name": self.name,
            "codec": self.codec,
            "elements": self.elements,
            "bytes_per_step": self.bytes / each,
            "gathered_bytes_per_step": self.gathered_bytes / each,
            "traffic_per_step": {scope: total / each for scope, total in self.traffic.items()},
            "density": self.entries / each / self.elements if self.elements and self.entries else None,
            "encode_seconds": self.encode_seconds / each,
            "wire_seconds": self.wire_seconds / each,
            "decode_seconds": self.decode_seconds / each,
        }


@dataclass
class Statistics:
    """Of one rank. `last` holds the timings of the last step, for traces."""

    layout: Layout
    steps: int = 0
    skipped: int = 0
    bytes: int = 0
    groups: list[GroupStatistics] = field(init=False)
    last: list[Timing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = [GroupStatistics(group.name, group.codec, group.elements) for group in self.layout.groups]

    def add(self, member: Member, timings: list[Timing]) -> None:
        self.steps += 1
        self.skipped = member.skipped
        self.last = timings
        for timing in timings:
            if timing.group < 0:
                continue
            group, run = self.groups[timing.group], member.groups[timing.group]
            group.bytes += run.bytes
            group.gathered_bytes += run.gathered
            group.entries += run.entries
            for scope, size in run.traffic.items():
                group.traffic[scope] = group.traffic.get(scope, 0.0) + size
            self.bytes += run.bytes
            for phase, start, stop in timing.phases:
                if phase == "encode":
                    group.encode_seconds += stop - start
                elif phase == "decode":
                    group.decode_seconds += stop - start
                else:
                    group.wire_seconds += stop - start

    def to_dict(self) -> dict[str, Any]:
        groups = [group.to_dict(self.steps) for group in self.groups]
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "bytes_per_step": self.bytes / max(self.steps, 1),
            **{
                key: sum(group[key] for group in groups)
                for key in ("encode_seconds", "wire_seconds", "decode_seconds")
            },
            "groups": groups,
        }
