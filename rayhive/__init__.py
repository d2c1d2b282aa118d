"""rayhive: what decentralised training settings are worth, measured."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rayhive.strategy.registration import register_with_lightning

if TYPE_CHECKING:
    from rayhive.strategy.strategy import HivemindStrategy

    CollaborativeStrategy = HivemindStrategy

__version__ = "0.1.0"
__all__ = ["CollaborativeStrategy", "HivemindStrategy", "__version__"]

#: What is imported when it is asked for; the second name is that of older versions.
_LAZY = {
    "HivemindStrategy": "rayhive.strategy.strategy:HivemindStrategy",
    "CollaborativeStrategy": "rayhive.strategy.strategy:HivemindStrategy",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _LAZY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


register_with_lightning()
