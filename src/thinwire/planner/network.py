"""GPU clusters modelled as two kinds of links: inside a machine and between machines."""

import math
import re
from dataclasses import dataclass

from ..errors import PlanError

_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|byte|b)(?:/s|ps)?\s*", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bytes_per_second(text: str) -> float:
    """Parse a rate such as `"100gbit"`, `"25gbit/s"` or `"300gbyte/s"`."""
    match = _RATE.fullmatch(text)
    if match is None or match[3] == "b" or float(match[1]) <= 0:
        raise PlanError(
            f"rate {text!r} is not understood: write a number above 0 with mbit, gbit, mbyte or gbyte, "
            f"like '100gbit' or '300gbyte/s'"
        )
    bits = 1.0 if match[3].lower() == "byte" else 8.0
    return float(match[1]) * _PREFIX[match[2].lower()] / bits


@dataclass(frozen=True, slots=True)
class Network:
    """`intra` and `inter` are bytes per second of a GPU inside its machine and of a machine's network card.

    Latencies are per round of a collective; a ring of p ranks takes p - 1 rounds.
    """

    nodes: int
    gpus: int
    intra: float
    inter: float
    intra_latency: float = 5e-6
    inter_latency: float = 15e-6
    name: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus < 1:
            raise PlanError(f"a cluster has at least one node with one GPU, not {self.nodes} with {self.gpus}")
        for value in (self.intra, self.inter):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"the rate of a link must be above 0, not {value} bytes per second")

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    def __str__(self) -> str:
        links = self.name or f"{_rate(self.intra)} inside, {_rate(self.inter)} between"
        return f"{self.nodes}x{self.gpus} {links}"


def _rate(bytes_per_second: float) -> str:
    return f"{8e-9 * bytes_per_second:g}gbit"


NETWORKS = {
    "pcie-25g": Network(8, 8, 10e9, 25e9 / 8, name="pcie-25g"),
    "nvlink-100g": Network(8, 8, 120e9, 100e9 / 8, name="nvlink-100g"),
}
"""The two clusters of the Espresso paper; see docs/methods/espresso.md for the rates inside a machine."""
