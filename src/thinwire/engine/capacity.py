"""How long a gathered message may be: a number that all ranks know before they encode."""

from __future__ import annotations

from collections import deque

WINDOW = 16
GRAIN = 64


class Capacity:
    """Bytes of a group's messages in the next step: a pure function of what all ranks wanted in earlier ones.

    All ranks read the same headers, so they agree without asking. The margin above the recent maximum follows the recent
    spread: 2 % for a codec that always wants the same, up to 25 %. What does not fit waits in the residual.

    `wanted` comes from other ranks and from checkpoints: never more than `largest`, whatever they say.
    """

    def __init__(self, expected: int, smallest: int, largest: int) -> None:
        self._smallest = smallest
        self._first = _round_up(max(smallest, expected + expected // 4))
        self.largest = max(_round_up(largest), self._first)
        self.recent: deque[int] = deque(maxlen=WINDOW)

    @property
    def value(self) -> int:
        if not self.recent:
            return self._first
        most, least = max(self.recent), min(self.recent)
        margin = max(most // 50, min(most // 4, (most - least) // 2))
        return min(self.largest, _round_up(max(self._smallest, most + margin)))

    def observe(self, wanted: int) -> None:
        """The largest `wanted` of all headers of a step that counts."""
        self.recent.append(wanted)


def _round_up(size: int) -> int:
    return -(-size // GRAIN) * GRAIN
