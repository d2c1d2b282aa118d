"""Several nodes made of one Linux machine: namespaces, shaped links, CPU quotas, real raylets."""

from __future__ import annotations

from rayhive.cluster.testbed.config import TestbedConfig, TestbedNodes, load_testbed
from rayhive.cluster.testbed.testbed import Testbed

__all__ = ["Testbed", "TestbedConfig", "TestbedNodes", "load_testbed"]
