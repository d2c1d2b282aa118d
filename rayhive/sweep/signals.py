"""Ctrl-C and SIGTERM: the first ends a sweep tidily, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The sweep was told to end before its work was done.

    As KeyboardInterrupt it is no Exception: whoever mends what went wrong must let it pass.

    Args:
        reason: Who said so, in words.
        signal_number: The signal, if it was one; it decides the exit code (128 + signal), as
            shells expect.
    """

    def __init__(self, reason: str, signal_number: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.signal_number = signal_number
        self.exit_code = 1 if signal_number is None else 128 + signal_number


class Interruption:
    """Turns the two signals into :class:`Interrupted`.

    Outside :meth:`held` a signal raises where the main thread is. Inside, the first is only noted
    in :attr:`requested`, so that what was just started is not lost; the second still raises.

    As a context manager it installs its handlers and puts the old ones back.
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
        """Install the handlers; again, if something (such as Ray) replaced them."""
        for number in SIGNALS:
            found = signal.signal(number, self._handle)
            self._before.setdefault(number, found or signal.SIG_DFL)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note the first signal instead of raising."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def check(self) -> None:
        """Raise what was noted.

        Raises:
            Interrupted: A signal came.
        """
        if self.requested is not None:
            raise self.requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first = self.requested is None
        if first:
            name = signal.Signals(number).name
            self.requested = Interrupted(f"interrupted by {name}", number)
        if not (first and self._held) and self.requested is not None:
            raise self.requested
