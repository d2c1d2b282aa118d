"""Executor that runs calls inline, for steps without background work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InlineExecutor(Executor):
    """Executor that runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function and return its result in a future; errors propagate to the caller."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
