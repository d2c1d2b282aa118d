"""Interruption of a sweep: the first Ctrl-C or SIGTERM ends it in order, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A sweep was ended before its last trial.

    Derives from :class:`BaseException`, as KeyboardInterrupt does, so that ``except Exception``
    does not swallow an interruption.

    Args:
        reason: Cause of the interruption, in words.
        signal_number: The signal, if one was received. It determines the exit code
            (128 + signal), as in shells.

    Attributes:
        folder: The folder of the run, once it is known.
        kept: Description of what the folder holds.
    """

    def __init__(self, reason: str, signal_number: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number
        self.exit_code = 1 if signal_number is None else 128 + signal_number
        self.folder: Path | None = None
        self.kept = "finished replicates are kept"


class Interruption:
    """Raises :class:`Interrupted` on SIGINT and SIGTERM.

    Outside :meth:`held` a signal raises in the main thread at once. Inside, the first signal is
    only recorded in :attr:`requested`, so that a replicate that is being started is not lost; the
    second one raises.

    As a context manager it installs its handlers and restores the previous ones. Off the main
    thread, where Python allows no signal handlers, it installs none.
    """

    def __init__(self) -> None:
        self.requested: Interrupted | None = None
        self._held = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        self.install()
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def install(self) -> None:
        """Install the handlers, or install them again after a library such as Ray replaced them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            found = signal.signal(number, self._handle)
            self._before.setdefault(number, found or signal.SIG_DFL)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Record the first signal instead of raising."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def check(self) -> None:
        """Raise the recorded interruption, if any.

        Raises:
            Interrupted: A signal was received.
        """
        if self.requested is not None:
            raise self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.requested is not None
        interrupted = Interrupted(f"interrupted by {signal.Signals(number).name}", number)
        self.requested = self.requested or interrupted
        if again:  # another error than the first one, which may be under way
            raise interrupted
        if not self._held:
            raise self.requested
