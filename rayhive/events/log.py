"""The event log of a replicate: a file with one event on each line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rayhive.errors import DamagedError, NewerVersionError
from rayhive.events.event import Event, dump_event, load_event


class EventLog:
    """An append-only file of events that survives the death of its writer.

    Args:
        path: The file; created with its folder, appended to if it exists. An incomplete last
            line, left by a writer that died, is removed: the next event would be joined to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        if self.path.stat().st_size:  # 0 for a device, which may be endless
            written = self.path.read_bytes()
            if not written.endswith(b"\n"):
                self._file.truncate(written.rfind(b"\n") + 1)

    def append(self, event: Event) -> None:
        """Write one event and hand it to the operating system."""
        self._file.write(dump_event(event) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Return when everything written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def read_events(path: str | Path) -> Iterator[Event]:
    """Yield the events of a log in the order of writing.

    An incomplete last line, left by a writer that died, is left out.

    Raises:
        DamagedError: A complete line is not an event; the line number is named.
        NewerVersionError: A newer rayhive wrote the log.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield load_event(line.decode("utf-8"))
            except ValueError as error:
                raise DamagedError(path, f", line {number}: not an event: {error}") from error
            except NewerVersionError as error:
                raise NewerVersionError(str(path), error.found, error.known) from None
