"""Format of Bamboo's traces: each row adds or removes one node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rayhive.faults.traces.trace import Record, RowError, TraceFormat, numbered_lines

_ROW = re.compile(r"(\d+(?:\.\d+)?)\s*,\s*(add|remove)\s*,\s*([^\s,]+)")


class Bamboo(TraceFormat):
    """``t_ms,add|remove,node``, without a header."""

    about = "rows t_ms,add|remove,NODE"

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether one of the first 20 rows matches."""
        first = text.splitlines()[:20]
        return any(_ROW.fullmatch(line.strip()) for line in first)

    @classmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield the record of each row."""
        for number, line in numbered_lines(text):
            found = _ROW.fullmatch(line)
            if found is not None:
                node = (found[3],)
                added, removed = (node, ()) if found[2] == "add" else ((), node)
                yield Record(number, float(found[1]) / 1000, added, removed)
            elif not line:
                yield Record(number, skipped="blank")
            else:
                yield RowError(number, line, "t_ms,add|remove,NODE")
