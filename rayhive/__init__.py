"""Measurement of decentralised training settings on slow links and unreliable machines.

``HivemindStrategy`` is a Lightning strategy. ``rayhive.sweep(study)`` runs a study,
``rayhive.run_scenario(name)`` one fault scenario, and ``rayhive.load(folder)`` loads the results of
a run as data frames. All of them are imported on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rayhive.strategy.registration import register_with_lightning

if TYPE_CHECKING:
    from rayhive.api import load, run_scenario, sweep
    from rayhive.strategy.strategy import HivemindStrategy

    CollaborativeStrategy = HivemindStrategy

__version__ = "0.2.0"
__all__ = [
    "CollaborativeStrategy",
    "HivemindStrategy",
    "__version__",
    "load",
    "run_scenario",
    "sweep",
]

#: Attributes that are imported on first use. ``CollaborativeStrategy`` is the name in the
#: documentation of older Lightning versions.
_LAZY = {
    "HivemindStrategy": "rayhive.strategy.strategy:HivemindStrategy",
    "CollaborativeStrategy": "rayhive.strategy.strategy:HivemindStrategy",
    "load": "rayhive.api:load",
    "run_scenario": "rayhive.api:run_scenario",
}


def _imported(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _imported(_LAZY[name])


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


class _SweepPackage(ModuleType):
    """The package ``rayhive.sweep``, which is also the function :func:`rayhive.api.sweep`.

    The import system binds the package to the attribute ``sweep`` of ``rayhive``, so a function of
    that name would vanish with the first import of a module in it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _imported("rayhive.api:sweep")(*args, **kwargs)


importlib.import_module("rayhive.sweep").__class__ = _SweepPackage
register_with_lightning()
