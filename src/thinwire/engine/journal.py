"""The journal of a run: JSON lines, one per step and one per event. `docs/report.md` says what they mean.

    start    once for each process that writes: who, where, which version of the format
    layout   what travels together and how, whenever that changes; with the plan, where there is one
    step     what one exchange took and sent
    event    something that a reader should know: a skipped step, another codec, an error
    note     numbers of the user's own, such as the loss
    fit      how the magnitudes of a group were distributed, where its codec took a look
    trace    when everything of one step happened, only where `wire.trace` asked for it

Seconds everywhere; `time` is the wall clock. What is not known is null.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..errors import JournalEmpty, JournalLine, JournalVersion
from ..planner.plan import Plan
from ..ranges import Amount, Count, Finite, Index, Rank, Real, Share, Version, World

VERSION = 1


class _Line(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    pass


class Start(_Line, frozen=True):
    """A process begins to write. `codec` is what `attach` was given."""

    version: Version
    time: Real
    rank: Rank
    world: World
    codec: str
    thinwire: str
    torch: str
    host: str
    ranks_per_node: World | None = None


class GroupLine(msgspec.Struct, frozen=True):
    """One group of the layout. `expected_bytes` is what its codec estimates that a rank hands over per step."""

    name: str
    codec: str
    chain: str
    elements: Count
    tensors: tuple[str, ...]
    dtype: str
    expected_bytes: Amount


class Layout(_Line, frozen=True):
    """The groups from `step` on, in the order in which they are sent."""

    step: Count
    time: Real
    codec: str
    groups: tuple[GroupLine, ...]
    plan: Plan | None = None


class GroupStep(msgspec.Struct, frozen=True, array_like=True):
    """One group in one step. `sent` are elements; 0 where the codec does not count them."""

    encode: Amount
    wire: Amount
    decode: Amount
    bytes: Count
    sent: Count


class Step(_Line, frozen=True):
    """One exchange of one rank.

    seconds   since the end of the exchange before it
    exposed   since the last gradient was ready: the job can only wait
    compute   the rest of `seconds`
    encode, decode  work of the exchange thread
    wire      how long at least one collective was under way
    bytes     handed over to collectives
    link_bytes  what the link of this rank carried: by the formulas of `thinwire.traffic`, or by the counters of its interface
    density   elements sent, as a share of those that could have been; target: what the codec was asked for
    path      "layout", "dense" for steps that are plain all-reduces, "ddp" for steps without a hook
    """

    step: Count
    time: Real
    seconds: Amount | None = None
    compute: Amount | None = None
    exposed: Amount | None = None
    encode: Amount | None = None
    wire: Amount | None = None
    decode: Amount | None = None
    bytes: Count | None = None
    density: Amount | None = None
    target: Amount | None = None
    residual_norm: Amount | None = None
    skipped: bool = False
    path: str = "layout"
    groups: tuple[GroupStep, ...] = ()
    link_bytes: Amount | None = None


class Event(_Line, frozen=True):
    """`what` is skipped, settings, codec, auto, control, fallback or closed."""

    step: Count
    time: Real
    what: str
    text: str


class Note(_Line, frozen=True):
    """Numbers of the user's own."""

    step: Count
    time: Real
    values: dict[str, Finite | None]


class FittedModel(msgspec.Struct, frozen=True):
    """`distance` is Wasserstein-1, as a share of the mean magnitude. `shares` are what the model expects in each bin."""

    name: str
    distance: Amount
    shares: tuple[Share, ...]


class Fit(_Line, frozen=True):
    """The magnitudes of one group in one exchange, on this rank, before anything was selected.

    zeros   their share of all elements; the rest is about the others
    edges   of bins, one more than there are `shares`; the smallest magnitudes are left out
    models  the closest first
    """

    step: Count
    time: Real
    group: str
    zeros: Share
    mean: Amount
    edges: tuple[Amount, ...]
    shares: tuple[Share, ...]
    models: tuple[FittedModel, ...]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took from `start` to `end`, since the step began. Group -1 stands for none.

    lane  job: what the training thread did; thread: work of the exchange thread; wire: a collective
    """

    lane: str
    name: str
    group: Index
    start: Real
    end: Real


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """A bucket was ready at this moment, and with it these groups were complete."""

    at: Real
    tensors: Count
    first: str
    groups: tuple[Count, ...]


class Trace(_Line, frozen=True):
    """One step in full. It began at `time`, by the wall clock, and at `clock`, by one that is exact but this process's own.

    Without the layout, groups are numbers of buckets.
    """

    step: Count
    time: Real
    seconds: Amount
    spans: tuple[Span, ...]
    arrivals: tuple[Arrival, ...]
    path: str = "layout"
    clock: Real = 0.0


Line: TypeAlias = Start | Layout | Step | Event | Note | Trace | Fit

encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class Journal(msgspec.Struct):
    """All that one rank wrote. A job that was resumed has several starts; of a step that came twice the later one counts."""

    path: str
    starts: list[Start] = msgspec.field(default_factory=list)
    layouts: list[Layout] = msgspec.field(default_factory=list)
    by_step: dict[int, Step] = msgspec.field(default_factory=dict)
    events: list[Event] = msgspec.field(default_factory=list)
    notes: list[Note] = msgspec.field(default_factory=list)
    fits: list[Fit] = msgspec.field(default_factory=list)
    traces: dict[int, Trace] = msgspec.field(default_factory=dict)

    @property
    def start(self) -> Start:
        return self.starts[-1]

    @property
    def steps(self) -> list[Step]:
        return [self.by_step[number] for number in sorted(self.by_step)]

    def layout_of(self, step: int, path: str = "layout") -> tuple[GroupLine, ...]:
        """The groups of a step; none where it went without a layout."""
        before = [layout for layout in self.layouts if layout.step < step]
        return before[-1].groups if before and path == "layout" else ()

    def add(self, line: Line) -> None:
        match line:
            case Start():
                self.starts.append(line)
            case Layout():
                self.layouts.append(line)
            case Step():
                self.by_step[line.step] = line
            case Event():
                self.events.append(line)
            case Note():
                self.notes.append(line)
            case Fit():
                self.fits.append(line)
            case Trace():
                self.traces[line.step] = line


class Reader:
    """Reads a journal, also one that is still being written: each `read` gives the lines that came since."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._at = self._number = 0
        self._begun = False

    def read(self) -> Iterator[Line]:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                content = file.read()
        except OSError as error:
            raise JournalEmpty(f"{self.path}: {error.strerror or error}") from None
        # The last line may be half written, or the job was killed in the middle of it.
        complete = content[: content.rfind(b"\n") + 1]
        self._at += len(complete)
        for text in complete.splitlines():
            self._number += 1
            if text.strip():
                yield self._line(text)

    def _line(self, text: bytes) -> Line:
        where = f"{self.path}, line {self._number}"
        try:
            line: Line = _decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            version = _version_of(text)
            if type(version) is int and version != VERSION:
                raise _other_version(where, version) from None
            raise JournalLine(f"{where}: {error}") from None
        if isinstance(line, Start):
            self._begun = True
            if line.version != VERSION:
                raise _other_version(where, line.version)
        elif not self._begun:
            raise JournalLine(
                f"{where}: a journal begins with a line of the kind 'start', not {type(line).__name__.lower()!r}"
            )
        return line


def read(path: str | Path) -> Journal:
    """The whole journal of one rank."""
    journal = Journal(str(path))
    for line in Reader(path).read():
        journal.add(line)
    if not journal.starts:
        raise JournalEmpty(f"{path}: nothing was written to this journal")
    return journal


def files(run: str | Path) -> list[Path]:
    """The journals of a run, in the order of ranks: a file, or all `.jsonl` files of a folder."""
    run = Path(run)
    if run.is_dir():
        found = sorted(run.glob("*.jsonl"), key=lambda path: (len(path.name), path.name))
        if not found:
            raise JournalEmpty(f"{run}: no .jsonl file in this folder; `wire.log_to({str(run)!r})` would write them")
        return found
    if not run.exists():
        raise JournalEmpty(f"there is no run {str(run)!r}: give a file or folder that `wire.log_to` writes")
    return [run]


def _version_of(text: bytes) -> object:
    try:
        line = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return line.get("version") if isinstance(line, dict) and line.get("kind") == "start" else None


def _other_version(where: str, version: int) -> JournalVersion:
    return JournalVersion(f"{where}: version {version}, this thinwire reads {VERSION}")
