"""What "auto" decided in a job: kept for `explain`, written to the journal and to the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.session import Session
from ..log import logger


@dataclass
class Decision:
    """What was found and done at one step, for `explain`."""

    step: int
    text: str
    considered: list[str] = field(default_factory=list)


class Decisions(list[Decision]):
    """All decisions of one wire, oldest first."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def add(self, text: str, considered: Sequence[str] = (), loud: bool = False) -> None:
        session = self._session
        self.append(Decision(session.steps, text, list(considered)))
        session.recorder.event(session.steps, "fallback" if loud else "auto", text)
        if session.world.local_ranks[0] == 0:
            (logger.warning if loud else logger.info)("auto, step %d: %s", session.steps, text)

    def record(self) -> None:
        """Write all of them to a journal that begins now."""
        for decision in self:
            self._session.recorder.event(decision.step, "auto", decision.text)

    def lines(self) -> list[str]:
        """For people."""
        found = []
        for decision in self:
            found.append(f"step {decision.step}: {decision.text}")
            found += [f"    {text}" for text in decision.considered]
        return found
