"""The file of one run of `bench converge`, and its columns of bytes.

`bytes_per_rank` are link bytes (`thinwire.traffic`): `counted_by` says whether by "formula", for ranks in memory, or read from
the counters of an "interface". `traffic_per_rank` is an older name of those by formula. Files without `counted_by` were written
when `bytes_per_rank` was what a rank hands over; what they know about the link is taken over, the rest is not known.
"""

import json
from pathlib import Path
from typing import Any

from .. import traffic
from .netns import LabError


def columns(link_bytes: float | None, elements: int, ranks: int) -> dict[str, Any]:
    """Of a run with ranks in memory; `link_bytes` per step."""
    return {
        "bytes_per_rank": link_bytes,
        "traffic_per_rank": link_bytes,
        "counted_by": "formula" if link_bytes is not None else None,
        "compression_rate": traffic.dense(elements, ranks) / link_bytes if link_bytes else None,
    }


def read(path: Path) -> dict[str, Any] | None:
    """The result of a run, or None if it is not complete."""
    try:
        content = json.loads(path.read_text())
        return counted_alike(content) if content["row"] and content["spec"] else None
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{str(path)!r} is not the result of a run, remove it: {error!r}") from None


def counted_alike(content: dict[str, Any]) -> dict[str, Any]:
    """A result of any version, with bytes as they are counted now."""
    row = dict(content["row"])
    if "counted_by" in row:
        return dict(content)
    if "traffic_per_rank" not in row:  # real ranks
        row["counted_by"] = "interface" if row["bytes_per_rank"] is not None else None
        return {**content, "row": row}
    # Of updates it was computed as if everything were summed, and rates of layers were those of bytes handed over.
    known = not row["method"].startswith("updates(")
    row |= columns(row["traffic_per_rank"] if known else None, row["parameters"], row["workers"])
    row |= {name: None for name in row if name.startswith("rate_")}
    points = {name: [_point(point, known) for point in content[name]] for name in ("curve", "trace")}
    return {**content, "row": row, **points}


def _point(point: dict[str, Any], known: bool) -> dict[str, Any]:
    rest = {name: value for name, value in point.items() if name not in ("bytes", "traffic")}
    return {**rest, "link_bytes": point["traffic"] if known else None}
