"""Format of SkyPilot's traces: live counts at equal intervals; a row is an entry of ``data``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rayhive.faults.traces.trace import MOST_S, Record, RowError, TraceFormat


class SkyPilot(TraceFormat):
    """``{"metadata": {"gap_seconds": 300}, "data": [live_count, ...]}``."""

    about = 'JSON {"metadata": {"gap_seconds": S}, "data": [live_count, ...]}'
    names = False

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether the text is an object with ``data``."""
        found = _read(text)
        return isinstance(found, dict) and "data" in found

    @classmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield the record of each entry of ``data``."""
        found = _read(text)
        metadata = found.get("metadata") if isinstance(found, dict) else None
        gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
        data = found.get("data") if isinstance(found, dict) else None
        if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 < gap <= MOST_S:
            yield RowError(1, gap, f"metadata.gap_seconds, above 0 and at most {MOST_S:g}")
            return
        if not isinstance(data, list):
            yield RowError(1, data, "data, a list of live counts")
            return
        for number, count in enumerate(data, start=1):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                yield RowError(number, count, "a live count, an integer of at least 0")
            else:
                yield Record(number, (number - 1) * float(gap), live=count)


def _read(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
