"""Registration of the strategy, so that ``Trainer(strategy="hivemind")`` works.

Lightning has no entry point for strategies, and importing it only to register takes seconds. So
an import hook registers when Lightning's own registry is imported. The registered function imports
the strategy when a trainer asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Names of the strategy in Lightning; the second one is that of older versions.
NAMES = ("hivemind", "collaborative")
#: Samples of a round for a strategy that is chosen by name, as in the documented examples. All
#: peers of a run have to agree on it, so it is a constant.
DEFAULT_TARGET_BATCH_SIZE = 8192

_TABLE = "lightning.pytorch.strategies"


def by_name(**arguments: Any) -> Any:
    """Return a :class:`rayhive.strategy.strategy.HivemindStrategy`."""
    from rayhive.strategy.strategy import HivemindStrategy

    return HivemindStrategy(**arguments)


def register() -> None:
    """Enter the strategy in Lightning's registry, and import that if necessary."""
    table = importlib.import_module(_TABLE).StrategyRegistry
    for name in NAMES:
        if name not in table:
            table.register(
                name,
                by_name,
                description="Trains in a swarm of unreliable peers, with hivemind",
                target_batch_size=DEFAULT_TARGET_BATCH_SIZE,
            )


def register_with_lightning() -> None:
    """Register now if Lightning is imported already, else as soon as it is."""
    if hasattr(sys.modules.get(_TABLE), "StrategyRegistry"):
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook for the module of Lightning's registry."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, whose loader registers afterwards."""
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register()

            loader.exec_module = execute_and_register
        return spec
