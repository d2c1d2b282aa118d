"""Formats of cloud availability traces.

A format recognises a text and parses each row into a :class:`Record`.
:func:`rayhive.faults.traces.trace.read_trace` assembles the trace.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, ClassVar, TypeGuard

from rayhive.errors import Problem
from rayhive.registry import Registry

#: Greatest time of a row [s]; larger values are typing errors, or overflow.
MOST_S = 1e10


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


def row_problem(row: int, value: object, allowed: str) -> Problem:
    """Return the problem of an invalid row.

    Args:
        row: Number of the row, from 1.
        value: Its content.
        allowed: The allowed content, in words.
    """
    return Problem(f"row {row}", value, allowed)


class TraceFormat(ABC):
    """A format of traces.

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
    def records(cls, text: str) -> Iterator[Record | Problem]:
        """Yield the record of each row, or the error of an invalid one."""


class LineFormat(TraceFormat):
    """A format with one record on each line. Blank lines are skipped.

    Attributes:
        row: Description of a line.
    """

    row: ClassVar[str]

    @classmethod
    @abstractmethod
    def record(cls, number: int, line: str) -> Record | Problem | None:
        """Return the content of a line, or its error; None for a line of another form."""

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether one of the first 20 lines has the form."""
        return any(cls.record(0, line.strip()) is not None for line in text.splitlines()[:20])

    @classmethod
    def records(cls, text: str) -> Iterator[Record | Problem]:
        """Yield the record of each line."""
        for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
            if not line:
                yield Record(number, skipped="blank")
            else:
                yield cls.record(number, line) or row_problem(number, line[:80], cls.row)


#: The formats, tried in the order of their names.
TRACE_FORMATS: Registry[type[TraceFormat]] = Registry("trace format")


@TRACE_FORMATS.register("bamboo")
class Bamboo(LineFormat):
    """Bamboo's traces: each row adds or removes one node; there is no header."""

    row = "t_ms,add|remove,NODE"
    about = f"rows {row}"
    _row = re.compile(r"(\d+(?:\.\d+)?)\s*,\s*(add|remove)\s*,\s*([^\s,]+)")

    @classmethod
    def record(cls, number: int, line: str) -> Record | None:
        """Return the content of a line; None for a line of another form."""
        found = cls._row.fullmatch(line)
        if found is None:
            return None
        node = (found[3],)
        added, removed = (node, ()) if found[2] == "add" else ((), node)
        return Record(number, float(found[1]) / 1000, added, removed)


@TRACE_FORMATS.register("live-counts")
class LiveCounts(LineFormat):
    """Traces from Google Cloud: a time and the number of live nodes; a header may stand above."""

    row = "YYYY-MM-DD, HH:MM:SS, live_count"
    about = f"rows {row}"
    names = False
    _row = re.compile(r"(\d{4}-\d{2}-\d{2})\s*,\s*(\d{1,2}:\d{2}:\d{2})\s*,\s*(\d{1,18})")
    _header = re.compile(r"[A-Za-z_ ]+(,[A-Za-z_ ]+){2}")

    @classmethod
    def record(cls, number: int, line: str) -> Record | Problem | None:
        """Return the content of a line, or its error; None for a line of another form."""
        found = cls._row.fullmatch(line)
        if found is None:
            header = number == 1 and cls._header.fullmatch(line)
            return Record(number, skipped="a header") if header else None
        try:
            moment = datetime.fromisoformat(f"{found[1]}T{found[2].zfill(8)}")
        except ValueError as error:
            return row_problem(number, line, f"an existing date and time ({error})")
        # Any time zone works: only differences matter, and all rows have the same zone.
        seconds = moment.replace(tzinfo=timezone.utc).timestamp()
        return Record(number, seconds, live=int(found[3]))


@TRACE_FORMATS.register("parcae")
class Parcae(LineFormat):
    """Parcae's traces: each row is a minute with all nodes added or removed in it.

    Rows without nodes are idle. Parcae also records the migration of work between nodes.
    """

    row = '[t_ms, "add|remove|no-op|migration", {"nodes": [NODE, ...]}]'
    about = f"JSON lines {row}"

    @classmethod
    def record(cls, number: int, line: str) -> Record | Problem | None:
        """Return the content of a line, or its error; None for a line of another form."""
        row = _json(line)
        if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], dict)):
            return None
        t_ms, operation, nodes = row[0], row[1], row[2].get("nodes")
        if not _is_number(t_ms) or not 0 <= t_ms <= 1000 * MOST_S:
            return None
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            return None
        if operation == "add":
            return Record(number, t_ms / 1000, added=tuple(nodes))
        if operation == "remove":
            return Record(number, t_ms / 1000, removed=tuple(nodes))
        if operation not in ("no-op", "migration"):
            return None
        if nodes:
            return row_problem(number, line[:80], f"without nodes: it is a {operation}")
        return Record(number, t_ms / 1000)


@TRACE_FORMATS.register("skypilot")
class SkyPilot(TraceFormat):
    """SkyPilot's traces: live counts at equal intervals; a row is an entry of ``data``."""

    about = 'JSON {"metadata": {"gap_seconds": S}, "data": [live_count, ...]}'
    names = False

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether the text is an object with ``data``."""
        found = _json(text)
        return isinstance(found, dict) and "data" in found

    @classmethod
    def records(cls, text: str) -> Iterator[Record | Problem]:
        """Yield the record of each entry of ``data``."""
        found = _json(text)
        whole = found if isinstance(found, dict) else {}
        metadata, data = whole.get("metadata"), whole.get("data")
        gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
        if not _is_number(gap) or not 0 < gap <= MOST_S:
            yield row_problem(1, gap, f"metadata.gap_seconds, above 0 and at most {MOST_S:g}")
            return
        if not isinstance(data, list):
            yield row_problem(1, data, "data, a list of live counts")
            return
        for number, count in enumerate(data, start=1):
            if not _is_number(count) or not isinstance(count, int) or count < 0:
                yield row_problem(number, count, "a live count, an integer of at least 0")
            else:
                yield Record(number, (number - 1) * float(gap), live=count)


def _json(text: str) -> Any:
    """Return the value of a JSON text, with None in place of NaN; None if it is no JSON."""
    try:
        return json.loads(text, parse_constant=lambda constant: None)
    except (ValueError, RecursionError):
        return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
