"""Format of traces from Google Cloud: each row is a time and the number of live nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone

from rayhive.faults.traces.trace import Record, RowError, TraceFormat, numbered_lines

_ROW = re.compile(r"(\d{4}-\d{2}-\d{2})\s*,\s*(\d{1,2}:\d{2}:\d{2})\s*,\s*(\d{1,18})")
_HEADER = re.compile(r"[A-Za-z_ ]+(,[A-Za-z_ ]+){2}")


class LiveCounts(TraceFormat):
    """``YYYY-MM-DD, HH:MM:SS, live_count``; a header may stand above."""

    about = "rows YYYY-MM-DD, HH:MM:SS, live_count"
    names = False

    @classmethod
    def recognises(cls, text: str) -> bool:
        """Return whether one of the first 20 rows matches."""
        return any(_ROW.fullmatch(line.strip()) for line in text.splitlines()[:20])

    @classmethod
    def records(cls, text: str) -> Iterator[Record | RowError]:
        """Yield the record of each row."""
        for number, line in numbered_lines(text):
            found = _ROW.fullmatch(line)
            if found is not None:
                try:
                    moment = datetime.fromisoformat(f"{found[1]}T{found[2].zfill(8)}")
                except ValueError as error:
                    yield RowError(number, line, f"an existing date and time ({error})")
                    continue
                # Any time zone works: only differences matter, and all rows have the same zone.
                seconds = moment.replace(tzinfo=timezone.utc).timestamp()
                yield Record(number, seconds, live=int(found[3]))
            elif not line:
                yield Record(number, skipped="blank")
            elif number == 1 and _HEADER.fullmatch(line):
                yield Record(number, skipped="a header")
            else:
                yield RowError(number, line, "YYYY-MM-DD, HH:MM:SS, live_count")
