"""Assembly of a trace from the rows of any format. Every skipped row is reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import ClassVar

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.faults.traces import TRACE_FORMATS

#: Problems of one file that are listed; more mean another format, or no trace.
LISTED = 20
#: Greatest time [s] and count of a row; larger values are typing errors, or overflow.
MOST_S = 1e10
MOST_NODES = 10**9
#: Traces that come with rayhive.
SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Record:
    """Content of one row.

    Attributes:
        row: Number of the row in the file, from 1.
        t_s: Time on the clock of the file [s].
        added: Names of the added nodes.
        removed: Names of the removed nodes.
        live: Number of live nodes from then on, in formats without names.
        skipped: Reason why a valid row has no content.
    """

    row: int
    t_s: float = 0.0
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    live: int | None = None
    skipped: str | None = None


@dataclass(frozen=True)
class Step:
    """All changes of one instant.

    Attributes:
        t_s: Time since the first instant [s].
        added: Number of added nodes.
        removed: Number of removed nodes.
        live: Number of live nodes afterwards.
        rows: Numbers of the rows of this instant.
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
        steps: Every instant with a row, in order of time.
        skipped: Row number -> reason why the row has no content (blank, a header).
        warnings: Irregularities of the file, each with its rows.
    """

    source: str
    format: str
    steps: tuple[Step, ...]
    skipped: dict[int, str]
    warnings: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Greatest number of live nodes."""
        return max(step.live for step in self.steps)

    @property
    def peak_s(self) -> float:
        """First time with the greatest number of live nodes [s]."""
        return max(self.steps, key=lambda step: step.live).t_s  # the first of several

    @property
    def length_s(self) -> float:
        """Time from the first row to the last [s]."""
        return self.steps[-1].t_s

    def live_at(self, t_s: float) -> int:
        """Return the number of live nodes at a time [s]."""
        return next((step.live for step in reversed(self.steps) if step.t_s <= t_s), 0)


class RowError(ValueError):
    """Invalid row.

    Args:
        row: Number of the row, from 1.
        value: Its content.
        allowed: The allowed content, in words.
    """

    def __init__(self, row: int, value: object, allowed: str) -> None:
        super().__init__(f"row {row}: {allowed}")
        self.row, self.value, self.allowed = row, value, allowed


class TraceFormat(ABC):
    """One format of traces.

    Attributes:
        about: Description of a row.
        names: Whether rows name nodes; otherwise they count them.
    """

    about: ClassVar[str]
    names: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def recognises(cls, text: str) -> bool:
        """Return whether a text is in this format."""

    @classmethod
    @abstractmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield the record of each row, or the error of an invalid one."""


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text with their numbers, from 1."""
    return enumerate((line.strip() for line in text.splitlines()), start=1)


def read_trace(path: str | Path, format: str | None = None) -> Trace:
    """Read a trace.

    Rows out of order are sorted by time, with a warning that names them.

    Args:
        path: The file.
        format: A registered format; None recognises it by the content.

    Raises:
        ConfigError: The file or a row is invalid, or rows contradict each other.
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
    """Return the path of a trace in a folder, or else of one that comes with rayhive.

    Args:
        file: A path, or the name of one that comes with rayhive.
        folder: Base of a relative path.
    """
    given = folder / file
    shipped = [item for item in SHIPPED.glob("*/*") if item.name == file]
    return shipped[0] if shipped and not given.exists() else given


def _shipped_like(file: Path) -> str | None:
    return nearest(file.name, [i.name for i in SHIPPED.glob("*/*") if i.name != "LICENSE"])


def recognise(text: str) -> str | None:
    """Return the name of the format of a text; None if no format recognises it."""
    for name, reader in TRACE_FORMATS.items():
        if reader.recognises(text):
            return name
    return None


def assemble(
    source: str, name: str, reader: type[TraceFormat], rows: Sequence[Record | RowError]
) -> Trace:
    """Assemble a trace from its rows.

    Args:
        source: The file, for messages.
        name: Name of its format.
        reader: The format.
        rows: Record or error of each row.

    Raises:
        ConfigError: A row is invalid or contradicts another; lists every problem.
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
        problems.append(Problem("file", source, "a trace with a live node"))
    if problems:
        more = len(problems) - LISTED
        if more > 0:
            problems[LISTED:] = [Problem("file", source, f"without {more} more invalid rows")]
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
    """Return the row, or an error if its numbers are out of range."""
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
    """Yield the steps of a trace with names; within an instant additions precede removals."""
    living: dict[str, int] = {}
    for t_s, group in groupby(records, key=lambda record: record.t_s):
        rows = list(group)
        added = removed = 0
        for record in rows:
            for node in record.added:
                if node in living:
                    before = f"a node that is not live; row {living[node]} added it"
                    problems.append(Problem(f"row {record.row}", node, before))
                living[node] = record.row
                added += 1
        for record in rows:
            for node in record.removed:
                if living.pop(node, None) is None:
                    problems.append(Problem(f"row {record.row}", node, "a live node"))
                removed += 1
        yield Step(t_s, added, removed, len(living), tuple(record.row for record in rows))


def _counted(records: Sequence[Record], warnings: list[str]) -> Iterator[Step]:
    """Yield the steps of a trace of counts; the last row of an instant in the file counts."""
    before = 0
    for t_s, group in groupby(records, key=lambda record: record.t_s):
        rows = list(group)
        live = rows[-1].live or 0
        if any(record.live != live for record in rows):
            numbers = [record.row for record in rows]
            warnings.append(f"{_rows(numbers)} have the same time; row {numbers[-1]} counts")
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
