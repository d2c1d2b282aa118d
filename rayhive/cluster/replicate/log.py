"""The folder of a running replicate: its spec, its plan and the log of its events."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from rayhive.errors import ReplicateError
from rayhive.events import Event, EventLog
from rayhive.files import write_atomically
from rayhive.spec.replicate import ReplicateSpec


class ReplicateLog:
    """Event log that remembers that its disk failed instead of raising.

    Args:
        spec: The replicate; its folder is made by :meth:`open`.
        failed: Called when an event cannot be written.

    Attributes:
        error: Description of the disk's failure; None without a failure.
    """

    def __init__(self, spec: ReplicateSpec, failed: Callable[[], None]) -> None:
        self.error: str | None = None
        self._spec = spec
        self._folder = Path(spec.folder)
        self._failed = failed
        self._log: EventLog | None = None

    @property
    def path(self) -> Path:
        """The file of the events."""
        return self._folder / "events.jsonl"

    def open(self) -> None:
        """Write spec and plan, and begin an empty log; earlier events are set aside.

        Raises:
            ReplicateError: The folder can't be written.
        """
        try:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            spec = self._spec.model_dump_json(by_alias=True, indent=1) + "\n"
            write_atomically(self._folder / "spec.json", spec)
            if self._spec.plan is not None:
                write_atomically(self._folder / "plan.json", self._spec.plan.canonical())
            self._log = EventLog(set_aside(self.path))
        except OSError as error:
            raise ReplicateError(f"{self._folder} can't be written: {error.strerror}") from error

    def append(self, event: Event) -> None:
        """Write one event; after a failure, do nothing."""
        if self._log is None or self.error is not None:
            return
        try:
            self._log.append(event)
        except OSError as error:
            self._note(error)

    def sync(self) -> None:
        """Sync the events to disk."""
        try:
            if self._log is not None and self.error is None:
                self._log.sync()
        except OSError as error:
            self._note(error)

    def close(self) -> None:
        """Sync and close."""
        try:
            if self._log is not None:
                self._log.close()
        except OSError as error:
            self._note(error)

    def note_failure(self) -> None:
        """Write the traceback of the current exception to the supervisor's own log."""
        try:
            with (self._folder / "logs" / "supervisor.log").open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
        except OSError:
            traceback.print_exc()

    def _note(self, error: OSError) -> None:
        self.error = f"events can't be written: {error}"
        self._failed()


def set_aside(path: Path) -> Path:
    """Rename the event log of an earlier attempt in the same folder; return ``path``."""
    if path.exists() and path.stat().st_size:
        number = 0
        while (old := path.with_name(f"{path.stem}.attempt-{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, old)
    return path
