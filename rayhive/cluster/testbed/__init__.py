"""Several nodes made of one Linux machine: namespaces, shaped links, CPU quotas, real raylets.

What it needs is imported when it is asked for: whether a machine could have a testbed is asked
before Ray is.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayhive.cluster.testbed.config import TestbedConfig, TestbedNodes, load_testbed
    from rayhive.cluster.testbed.lifecycle import Testbed

__all__ = ["Testbed", "TestbedConfig", "TestbedNodes", "load_testbed"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    where = "lifecycle" if name == "Testbed" else "config"
    return getattr(importlib.import_module(f"{__name__}.{where}"), name)
