"""Temporary replacement of a module's methods while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Overrides:
    """Replaces methods of one object, not of its class, until :meth:`restore`.

    Args:
        target: The object.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._before: dict[str, Any] = {}

    def set(self, name: str, method: Callable[..., Any]) -> None:
        """Replace the method ``name`` by ``method``."""
        self._before.setdefault(name, vars(self._target).get(name, _ABSENT))
        vars(self._target)[name] = method

    def restore(self) -> None:
        """Restore all replaced methods; calling it again does nothing."""
        while self._before:
            name, before = self._before.popitem()
            if before is _ABSENT:
                vars(self._target).pop(name, None)
            else:
                vars(self._target)[name] = before
