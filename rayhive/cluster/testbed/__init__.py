"""Testbed: several Ray nodes on one Linux machine, with shaped links and CPU quotas.

The submodules are imported on demand, so that the privileges of a machine can be checked without
importing Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Testbed", "TestbedConfig", "TestbedNodes", "load_testbed"]

if TYPE_CHECKING:
    from rayhive.cluster.testbed.config import TestbedConfig, TestbedNodes, load_testbed
    from rayhive.cluster.testbed.lifecycle import Testbed
else:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(name)
        where = "lifecycle" if name == "Testbed" else "config"
        return getattr(importlib.import_module(f"{__name__}.{where}"), name)
