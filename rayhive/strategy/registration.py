"""Registration of the strategy, so that ``Trainer(strategy="hivemind")`` works.

Lightning has no entry point for strategies, and importing it only to register takes seconds. So
an import hook registers when Lightning imports the module that reads its registry. The registered
function imports the strategy when a trainer asks for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
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
_READER = "lightning.pytorch.trainer.connectors.accelerator_connector"


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
    """Import hook for the module that looks strategies up."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Register before that module is imported; the other finders find it."""
        if fullname == _READER:
            sys.meta_path.remove(self)
            register()
