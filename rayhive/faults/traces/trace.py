"""From the rows of any format to live nodes over time; no row is dropped without a word."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.faults.traces import TRACE_FORMATS

#: Problems of one file that are told; beyond them it is another format, or no trace.
TOLD = 20
#: Greatest time and count of a row; beyond them it is a slip, or becomes infinite.
MOST_S = 1e10
MOST_NODES = 10**9
#: Traces that come with rayhive.
SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Record:
    """What one row says.

    Attributes:
        row: Its number in the file, from 1.
        t_s: When [s], on the clock of the file.
        added: Nodes that came; their names.
        removed: Nodes that went.
        live: Nodes that live from then on, in formats that count and don't name.
        skipped: Why the row says nothing, for one that is no mistake either.
    """

    row: int
    t_s: float = 0.0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    live: int | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Step:
    """All that changed in one instant.

    Attributes:
        t_s: When [s]; the first instant of a trace is 0.
        added: Nodes that came.
        removed: Nodes that went.
        live: Nodes that live afterwards.
        rows: Numbers of the rows that say so.
    """

    t_s: float
    added: int
    removed: int
    live: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Live nodes over time.

    Attributes:
        source: The file.
        format: Name of its format.
        steps: Every instant that a row is about, in order of time.
        skipped: Row number -> why it says nothing (blank, a header).
        warnings: What is odd about the file; each names its rows.
    """

    source: str
    format: str
    steps: tuple[Step, ...]
    skipped: dict[int, str]
    warnings: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Most nodes that lived at once."""
        return max(step.live for step in self.steps)

    @property
    def peak_s(self) -> float:
        """When most nodes lived for the first time [s]."""
        return max(self.steps, key=lambda step: step.live).t_s  # the first of several

    @property
    def length_s(self) -> float:
        """Time from the first row to the last [s]."""
        return self.steps[-1].t_s

    def live_at(self, t_s: float) -> int:
        """Return the number of nodes that live at a time [s]."""
        return next((step.live for step in reversed(self.steps) if step.t_s <= t_s), 0)


class RowError(ValueError):
    """A row that cannot be read.

    Args:
        row: Its number, from 1.
        value: What it holds.
        allowed: What it should be.
    """

    def __init__(self, row: int, value: object, allowed: str) -> None:
        super().__init__(f"row {row}: {allowed}")
        self.row, self.value, self.allowed = row, value, allowed


class TraceFormat(ABC):
    """One format of traces.

    Attributes:
        about: What a row looks like.
        names: Whether rows name nodes; if not, they count them.
    """

    about: ClassVar[str]
    names: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def recognises(cls, text: str) -> bool:
        """Say whether a text looks like this format."""

    @classmethod
    @abstractmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield what each row says, or why it can't be read."""


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text with their numbers, from 1."""
    return enumerate((line.strip() for line in text.splitlines()), start=1)


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """Read a trace.

    Rows out of order are sorted by their time, with a warning that names them.

    Args:
        path: The file.
        format: A registered format; by default it is recognised by the content.

    Raises:
        ConfigError: The file or rows of it cannot be read, or contradict each other.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(
            Problem("file", str(file), f"a readable text file ({error})", _shipped_like(file))
        ) from error
    name = format or recognise(text)
    if name is None:
        raise ConfigError(
            Problem(
                "file",
                str(file),
                "a trace of a known format: "
                + "; ".join(f"{key} ({item.about})" for key, item in TRACE_FORMATS.items()),
            )
        )
    reader: type[TraceFormat] = TRACE_FORMATS.get(name, "format")
    return assemble(str(file), name, reader, list(reader.records(text)))


def find_trace(file: str, folder: Path) -> Path:
    """Return the path of a trace: from a folder, or else one that comes with rayhive.

    Args:
        file: A path, or the name of one that comes with rayhive.
        folder: What a relative path starts from.
    """
    given = folder / file
    shipped = [item for item in SHIPPED.glob("*/*") if item.name == file]
    return shipped[0] if shipped and not given.exists() else given


def _shipped_like(file: Path) -> str | None:
    return nearest(file.name, [i.name for i in SHIPPED.glob("*/*") if i.name != "LICENSE"])


def recognise(text: str) -> str | None:
    """Return the name of the format that a text is in."""
    for name, reader in TRACE_FORMATS.items():
        if reader.recognises(text):
            return name
    return None


def assemble(
    source: str, name: str, reader: type[TraceFormat], rows: Sequence[Record | RowError]
) -> Trace:
    """Return the trace that rows make.

    Args:
        source: The file, for messages.
        name: Name of its format.
        reader: The format.
        rows: What the format says of each row.

    Raises:
        ConfigError: With every row that cannot be read or contradicts another.
    """
    rows = [_bounded(row) for row in rows]
    errors = [row for row in rows if isinstance(row, RowError)]
    records = [row for row in rows if isinstance(row, Record) and row.skipped is None]
    problems = [Problem(f"row {e.row}", e.value, e.allowed) for e in errors]
    warnings: list[str] = []
    late = list(_late(records))
    if late:
        warnings.append(f"{source}: out of order, and sorted by time: {_rows(late)}")
    records.sort(key=lambda record: record.t_s)
    steps: list[Step] = []
    if not problems:
        counts = _named(records, problems) if reader.names else _counted(records, warnings)
        steps = list(counts)
    if not problems and not any(step.live for step in steps):
        problems.append(Problem("file", source, "a trace in which a node lives"))
    if problems:
        more = len(problems) - TOLD
        if more > 0:
            problems[TOLD:] = [Problem("file", source, f"mended: {more} more rows are wrong")]
        raise ConfigError(problems, source)
    start = steps[0].t_s
    return Trace(
        source=source,
        format=name,
        steps=tuple(
            Step(round(s.t_s - start, 3), s.added, s.removed, s.live, s.rows) for s in steps
        ),
        skipped={
            row.row: row.skipped
            for row in rows
            if isinstance(row, Record) and row.skipped is not None
        },
        warnings=tuple(warnings),
    )


def _bounded(row: Record | RowError) -> Record | RowError:
    """Return a row, or what is wrong with it if its numbers are beyond all traces."""
    if isinstance(row, RowError):
        return row
    if not abs(row.t_s) <= MOST_S:
        return RowError(row.row, row.t_s, f"a time of at most {MOST_S:g} s")
    if row.live is not None and row.live > MOST_NODES:
        return RowError(row.row, row.live, f"at most {MOST_NODES:,} nodes")
    return row


def _late(records: Iterable[Record]) -> Iterator[int]:
    latest = float("-inf")
    for record in records:
        if record.t_s < latest:
            yield record.row
        latest = max(latest, record.t_s)


def _named(records: Sequence[Record], problems: list[Problem]) -> Iterator[Step]:
    """Follow the nodes by name; in one instant they come before they go."""
    living: dict[str, int] = {}
    for t_s, group in groupby(records, key=lambda record: record.t_s):
        rows = list(group)
        added = removed = 0
        for record in rows:
            for node in record.added:
                if node in living:
                    before = f"a node that does not live; row {living[node]} added it"
                    problems.append(Problem(f"row {record.row}", node, before))
                living[node] = record.row
                added += 1
        for record in rows:
            for node in record.removed:
                if living.pop(node, None) is None:
                    problems.append(Problem(f"row {record.row}", node, "a node that lives"))
                removed += 1
        yield Step(t_s, added, removed, len(living), tuple(record.row for record in rows))


def _counted(records: Sequence[Record], warnings: list[str]) -> Iterator[Step]:
    """Follow the count; of several at one time the last in the file holds."""
    before = 0
    for t_s, group in groupby(records, key=lambda record: record.t_s):
        rows = list(group)
        live = rows[-1].live or 0
        if any(record.live != live for record in rows):
            numbers = [record.row for record in rows]
            warnings.append(f"{_rows(numbers)} are about one moment; row {numbers[-1]} holds")
        yield Step(
            t_s,
            max(0, live - before),
            max(0, before - live),
            live,
            tuple(record.row for record in rows),
        )
        before = live


def _rows(numbers: Sequence[int]) -> str:
    listed = ", ".join(str(number) for number in sorted(numbers))
    return f"row{'s' if len(numbers) > 1 else ''} {listed}"
