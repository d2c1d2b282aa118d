"""Ctrl-C at points where no lock is held.

Python raises ``KeyboardInterrupt`` between any two bytecodes of the main thread, also between
taking a lock and entering the ``with`` block that releases it. A lock that is lost in this way
blocks the thread that needs it next. If that is a worker of an executor, the interpreter waits for
it at exit for ever.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


class DeferredInterrupts:
    """Context manager that holds SIGINT back and raises ``KeyboardInterrupt`` at its end.

    It may be entered again inside itself. It does nothing outside the main thread, and nothing
    where SIGINT has a handler other than Python's own: such a handler runs at once, as usual.

    Args:
        on_interrupt: Called by the signal handler, to end a wait in the body. It must not take
            locks.
        on_exit: Called at the end of the outermost body.
    """

    def __init__(
        self,
        on_interrupt: Callable[[], None] = lambda: None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_interrupt, self._on_exit = on_interrupt, on_exit
        self._depth = 0
        self._pending = False

    def __enter__(self) -> None:
        if not _in_main_thread():
            return
        if not self._depth:
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return
            self._pending = False
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if not _in_main_thread() or not self._depth:
            return
        self._depth -= 1
        if self._depth:
            return
        self._on_exit()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._raise_pending()

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` as usual in the body: it holds no lock of the swarm's."""
        if not _in_main_thread() or not self._depth:
            yield
            return
        depth, self._depth = self._depth, 0
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._raise_pending()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)
            self._depth = depth

    def during(self, function: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Return a user's function, during which Ctrl-C acts at once; None if there is none."""
        if function is None:
            return None

        def allowed() -> Any:
            with self.allowed():
                return function()

        return allowed

    def _note(self, *_: Any) -> None:
        self._pending = True
        self._on_interrupt()

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, False
        if pending:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
