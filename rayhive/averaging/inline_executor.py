"""Background work that nobody wants in the background."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InlineExecutor(Executor):
    """Runs what it is given at once, in the thread that asks for it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function and return its result in a future; its errors are the caller's."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
