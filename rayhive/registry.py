"""Registry of implementations by name, for codecs, workloads, faults, metrics and others."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

from rayhive.errors import ConfigError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """A table from names to implementations of one kind.

    Args:
        kind: Name of an entry's kind, in the singular, for error messages.
        package: Package that registers the entries, imported at the first look-up; None if the
            module of the registry does.
        in_order: Whether names keep the order of registration; by default they are sorted.
    """

    def __init__(self, kind: str, package: str | None = None, in_order: bool = False) -> None:
        self.kind = kind
        self._package = package
        self._in_order = in_order
        self._loaders: dict[str, Callable[[], T]] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under ``name``.

        Raises:
            ValueError: ``name`` is taken (a programming error, not bad input).
        """

        def enter(entry: T) -> T:
            self._enter(name, lambda: entry)
            return entry

        return enter

    def register_lazy(self, name: str, target: str) -> None:
        """Register ``target`` under ``name`` without importing it.

        Args:
            name: The name.
            target: ``package.module:attribute``, imported at the first lookup, so that listing the
                names or refusing a wrong one needs no heavy import.

        Raises:
            ValueError: ``name`` is taken.
        """
        module, _, attribute = target.partition(":")
        self._enter(name, lambda: cast(T, getattr(importlib.import_module(module), attribute)))

    def register_files(self, package: str) -> None:
        """Register every file of a package except ``base.py``, without importing it.

        The name is that of the file. The entry is its class with the same name in CamelCase, as
        ``SignFlip`` in ``sign_flip.py``.

        Args:
            package: Name of the package.

        Raises:
            ValueError: A name is taken.
        """
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name != "base":
                attribute = "".join(map(str.capitalize, module.name.split("_")))
                self.register_lazy(module.name, f"{package}.{module.name}:{attribute}")

    def _enter(self, name: str, loader: Callable[[], T]) -> None:
        if name in self._loaders:
            raise ValueError(f"{self.kind} {name!r} is registered twice; known: {self.names()}")
        self._loaders[name] = loader

    @contextlib.contextmanager
    def replaced(self, name: str, entry: T) -> Iterator[None]:
        """Register ``entry`` for the length of a ``with`` block.

        It hides an entry of the same name.
        """
        before = dict(self._loaders)
        self._loaders[name] = lambda: entry
        try:
            yield
        finally:
            self._loaders = before

    def get(self, name: str, key: str | None = None) -> T:
        """Return the entry called ``name``.

        Args:
            name: The name.
            key: The configuration key with the name, for the error message.

        Raises:
            ConfigError: No entry has this name; the message lists the names.
        """
        if name not in self:
            raise ConfigError(unknown(key or self.kind, name, self.names()))
        return self._loaders[name]()

    def _fill(self) -> None:
        if self._package is not None:
            importlib.import_module(self._package)

    def names(self) -> tuple[str, ...]:
        """Return every registered name."""
        self._fill()
        return tuple(self._loaders if self._in_order else sorted(self._loaders))

    def items(self) -> tuple[tuple[str, T], ...]:
        """Return every (name, entry) pair, in the order of :meth:`names`."""
        return tuple((name, self.get(name)) for name in self.names())

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._loaders


# Each registry is filled by the package with the implementations. They are defined here so that the
# layers below these packages can look names up.
CODECS: Registry[Any] = Registry("codec", package="rayhive.compression")
AVERAGERS: Registry[Any] = Registry("averager", package="rayhive.averaging")
WORKLOADS: Registry[Any] = Registry("workload", package="rayhive.workloads")
FAULTS: Registry[Any] = Registry("fault", package="rayhive.faults")
SCENARIOS: Registry[Any] = Registry("scenario", package="rayhive.faults")
METRICS: Registry[Any] = Registry("metric group", package="rayhive.metrics")
INVARIANTS: Registry[Any] = Registry("invariant", package="rayhive.invariants")
NOTICE_SOURCES: Registry[Any] = Registry("notice source", package="rayhive.cluster.node.notices")
BASELINES: Registry[Any] = Registry("baseline", package="rayhive.baselines", in_order=True)
