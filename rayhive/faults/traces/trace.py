"""Cloud availability traces: reading in any format, and folding onto the peers of a swarm.

Every row of a file is in a step of its trace, or reported as skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Literal

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.faults.traces.formats import MOST_S, TRACE_FORMATS, Record, row_problem

#: Problems of one file that are listed; more mean another format, or no trace.
LISTED = 20
#: Greatest count of a row; larger values are typing errors.
MOST_NODES = 10**9
#: Traces that come with rayhive.
SHIPPED = Path(__file__).parent / "data"
#: Number of nodes that stands for all peers of a swarm; see :func:`fold`.
Scale = Literal["peak", "start"]


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
        shipped = [item.name for item in SHIPPED.glob("*/*") if item.name != "LICENSE"]
        allowed = f"a readable text file ({error})"
        raise ConfigError(
            Problem("file", str(file), allowed, nearest(file.name, shipped))
        ) from error
    matching = (name for name, reader in TRACE_FORMATS.items() if reader.recognises(text))
    name = format or next(matching, None)
    if name is None:
        known = "; ".join(f"{key} ({item.about})" for key, item in TRACE_FORMATS.items())
        raise ConfigError(Problem("file", str(file), f"a trace of a known format: {known}"))
    return assemble(str(file), name, TRACE_FORMATS.get(name, "format").records(text))


def find_trace(file: str, folder: Path) -> Path:
    """Return the path of a trace in a folder, or else of one that comes with rayhive.

    Args:
        file: A path, or the name of one that comes with rayhive.
        folder: Base of a relative path.
    """
    given = folder / file
    shipped = [item for item in SHIPPED.glob("*/*") if item.name == file]
    return shipped[0] if shipped and not given.exists() else given


def assemble(source: str, name: str, rows: Iterable[Record | Problem]) -> Trace:
    """Assemble a trace from its rows.

    Args:
        source: The file, for messages.
        name: Name of its format.
        rows: Record or error of each row.

    Raises:
        ConfigError: A row is invalid or contradicts another; lists every problem.
    """
    rows = [_bounded(row) for row in rows]
    problems = [row for row in rows if isinstance(row, Problem)]
    valid = [row for row in rows if isinstance(row, Record)]
    records = [row for row in valid if row.skipped is None]
    warnings: list[str] = []
    latest = accumulate((record.t_s for record in records), max)
    late = [record.row for record, t_s in zip(records, latest, strict=True) if record.t_s < t_s]
    if late:
        warnings.append(f"{source}: out of order, and sorted by time: {_rows(late)}")
    records.sort(key=lambda record: record.t_s)
    steps: list[Step] = []
    if not problems:
        named = TRACE_FORMATS.get(name).names
        steps = list(_named(records, problems) if named else _counted(records, warnings))
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
        steps=tuple(replace(step, t_s=round(step.t_s - start, 3)) for step in steps),
        skipped={row.row: row.skipped for row in valid if row.skipped is not None},
        warnings=tuple(warnings),
    )


def _bounded(row: Record | Problem) -> Record | Problem:
    """Return the row, or an error if its numbers are out of range."""
    if isinstance(row, Problem):
        return row
    if not abs(row.t_s) <= MOST_S:
        return row_problem(row.row, row.t_s, f"a time of at most {MOST_S:g} s")
    if row.live is not None and row.live > MOST_NODES:
        return row_problem(row.row, row.live, f"at most {MOST_NODES:,} nodes")
    return row


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
                    problems.append(row_problem(record.row, node, before))
                living[node] = record.row
                added += 1
        for record in rows:
            for node in record.removed:
                if living.pop(node, None) is None:
                    problems.append(row_problem(record.row, node, "a live node"))
                removed += 1
        yield Step(t_s, added, removed, len(living), tuple(record.row for record in rows))


def _counted(records: Sequence[Record], warnings: list[str]) -> Iterator[Step]:
    """Yield the steps of a trace of counts; the last row of an instant in the file counts."""
    before = 0
    for t_s, group in groupby(records, key=lambda record: record.t_s):
        rows = list(group)
        live = rows[-1].live or 0
        numbers = tuple(record.row for record in rows)
        if any(record.live != live for record in rows):
            warnings.append(f"{_rows(numbers)} have the same time; row {numbers[-1]} counts")
        yield Step(t_s, max(0, live - before), max(0, before - live), live, numbers)
        before = live


def _rows(numbers: Sequence[int]) -> str:
    listed = ", ".join(str(number) for number in sorted(numbers))
    return f"row{'s' if len(numbers) > 1 else ''} {listed}"


@dataclass(frozen=True)
class Level:
    """One instant of a folded trace.

    Attributes:
        t_s: Time in the run [s].
        gone: Number of replicas that go, before any comes.
        come: Number of replicas that come.
        live: Number of live replicas afterwards.
    """

    t_s: float
    gone: int
    come: int
    live: int


def fold(
    trace: Trace,
    replicas: int,
    start_s: float,
    length_s: float,
    compression: float,
    scale: Scale = "peak",
) -> Iterator[Level]:
    """Fold a window of a trace onto replicas.

    L live nodes give ``max(1, round(replicas · L / base))`` live replicas (halves up): the fraction
    of live nodes is kept as far as integers allow, and one replica always lives. At an instant with
    removals and additions, replicas first go down to the number for the nodes that stayed.

    Args:
        trace: The trace.
        replicas: Peers or nodes that start together.
        start_s: Begin of the window [s of the trace].
        length_s: Length of the window [s of the trace]; both ends belong to it.
        compression: Seconds of the trace in one second of the run.
        scale: The ``base``: ``peak`` is the most live nodes in the window, ``start`` the number at
            its begin; with ``start`` the count may exceed ``replicas``.

    Yields:
        Every instant at which the number changes; the first, at 0 s, sets the number for the begin
        of the window.
    """
    end_s = start_s + length_s
    inside = [step for step in trace.steps if start_s < step.t_s <= end_s]
    first = trace.live_at(start_s)
    base = max([first, *(step.live for step in inside)]) if scale == "peak" else first
    if base == 0:
        return

    def replicas_of(live: int) -> int:
        return max(1, (2 * replicas * live + base) // (2 * base))

    live_nodes, live = first, replicas_of(first)
    if live < replicas:
        yield Level(0.0, replicas - live, 0, live)
    for step in inside:
        low = min(live, replicas_of(max(0, live_nodes - step.removed)))
        after = replicas_of(step.live)
        low = min(low, after)
        if low < live or after > low:
            t_s = round((step.t_s - start_s) / compression, 3)
            yield Level(t_s, live - low, after - low, after)
        live_nodes, live = step.live, after
