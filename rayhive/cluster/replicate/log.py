"""The folder of a running replicate: its spec, its plan and the log of its events."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from rayhive.errors import ReplicateError
from rayhive.events import Event, EventLog
from rayhive.spec.replicate import ReplicateSpec


class ReplicateLog:
    """Event log that remembers that its disk failed instead of raising.

    Args:
        spec: The replicate; its folder is made by :meth:`open`.
        failed: Called when an event can't be written.

    Attributes:
        error: What is wrong with the disk; None if nothing is.
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
        """Write down what is run, and begin an empty log.

        Raises:
            ReplicateError: The folder can't be written.
        """
        try:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            spec = self._spec.model_dump_json(by_alias=True, indent=1) + "\n"
            _write(self._folder / "spec.json", spec)
            if self._spec.plan is not None:
                _write(self._folder / "plan.json", self._spec.plan.canonical())
            self._log = EventLog(_fresh(self.path))
        except OSError as error:
            raise ReplicateError(f"{self._folder} can't be written: {error.strerror}") from error

    def append(self, event: Event) -> None:
        """Write one event; after a failure nothing more is written."""
        if self._log is None or self.error is not None:
            return
        try:
            self._log.append(event)
        except OSError as error:
            self._note(error)

    def sync(self) -> None:
        """Return when everything is on disk, or can't be."""
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
        """Write the traceback of the present exception to the supervisor's own log."""
        try:
            with (self._folder / "logs" / "supervisor.log").open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
        except OSError:
            traceback.print_exc()

    def _note(self, error: OSError) -> None:
        self.error = f"events can't be written: {error}"
        self._failed()


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _fresh(path: Path) -> Path:
    """Set aside the events of an earlier attempt in the same folder; return ``path``."""
    if path.exists() and path.stat().st_size:
        number = 0
        while (old := path.with_name(f"{path.stem}.attempt-{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, old)
    return path
