"""Format of Parcae's traces: each row is a minute with all nodes added or removed in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rayhive.faults.traces.trace import MOST_S, Record, RowError, TraceFormat, numbered_lines

#: Operations without nodes: Parcae also records the migration of work between nodes.
_IDLE = ("no-op", "migration")
_ALLOWED = '[t_ms, "add|remove|no-op|migration", {"nodes": [NODE, ...]}]'


class Parcae(TraceFormat):
    """JSON lines ``[t_ms, operation, {"nodes": [...], ...}]``."""

    about = f"JSON lines {_ALLOWED}"

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether one of the first 20 rows matches."""
        return any(isinstance(_read(line), tuple) for line in text.splitlines()[:20])

    @classmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield the record of each row."""
        for number, line in numbered_lines(text):
            found = _read(line)
            if not line:
                yield Record(number, skipped="blank")
            elif found is None:
                yield RowError(number, line[:80], _ALLOWED)
            else:
                t_ms, operation, nodes = found
                if operation in _IDLE and nodes:
                    yield RowError(number, line[:80], f"without nodes: it is a {operation}")
                    continue
                yield Record(
                    number,
                    t_ms / 1000,
                    nodes if operation == "add" else (),
                    nodes if operation == "remove" else (),
                )


def _read(line: str) -> tuple[float, str, tuple[str, ...]] | None:
    try:
        row: Any = json.loads(line, parse_constant=lambda text: None)
    except (ValueError, RecursionError):
        return None
    if not (isinstance(row, list) and len(row) == 3 and isinstance(row[2], dict)):
        return None
    t_ms, operation, more = row
    nodes = more.get("nodes")
    if isinstance(t_ms, bool) or not isinstance(t_ms, (int, float)):
        return None
    if not 0 <= t_ms <= 1000 * MOST_S:
        return None
    if operation not in ("add", "remove", *_IDLE):
        return None
    if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
        return None
    return float(t_ms), str(operation), tuple(nodes)
