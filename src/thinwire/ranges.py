"""Ranges of the numbers in states, plans, profiles, journals and other files, as types of their fields.

msgspec checks them while it decodes, and its error names the field. No number of a file is read without one of them:
`tests/hostile/test_numbers.py` finds fields that have none. They are wide and rule out what no run can have written and
what arithmetic cannot take; whether a number fits this job is for its reader to say.
"""

import sys
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta

MOST_RANKS = 2**20
MOST = 2**53
"""Steps, elements, bytes: whole numbers that a float holds exactly."""
SEEDS = 2**64
LARGEST = 1e100
"""Three numbers of this size can be multiplied, and any number of them added, without an infinity."""

Version: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
World: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
RankOrAll: TypeAlias = Annotated[int, Meta(ge=-1, lt=MOST_RANKS)]
"""-1 stands for all ranks."""
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
Elements: TypeAlias = Annotated[int, Meta(ge=1, le=MOST)]
Index: TypeAlias = Annotated[int, Meta(ge=-1, le=MOST)]
"""-1 stands for none."""
Whole: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Amount: TypeAlias = Annotated[float, Meta(ge=0.0, le=LARGEST)]
"""Seconds, shares, norms: what has no sign."""
Positive: TypeAlias = Annotated[float, Meta(gt=0.0, le=LARGEST)]
Real: TypeAlias = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Weight: TypeAlias = Annotated[float, Meta(gt=0.0, le=1.0)]
Finite: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Numbers of the user's own."""


def whole(name: str, value: object, least: int, most: int = MOST) -> None:
    """Refuse an argument or a saved field that is no whole number from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number from {least} to {most}, not {_show(value)}")


def number(name: str, value: object, least: float, most: float = LARGEST) -> None:
    """Refuse an argument or a saved field that is no number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{name} must be a number from {least:g} to {most:g}, not {_show(value)}")


def array(name: str, values: Any, least: float = -LARGEST, most: float = LARGEST) -> None:
    """Refuse a saved array or tensor with a value outside of `least` to `most`."""
    flat = np.asarray(values, np.float64)
    inside = (flat >= least) & (flat <= most)
    if not bool(inside.all()):
        raise ValueError(f"{name} must hold numbers from {least:g} to {most:g}, not {flat[~inside].flat[0]}")


def _show(value: object) -> str:
    """A number of thousands of digits is nothing to print, and Python refuses to."""
    return "a number of more than 20 digits" if isinstance(value, int) and abs(value) >= 10**20 else f"{value!r:.60}"
