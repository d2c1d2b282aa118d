"""Several nodes made of one Linux machine: namespaces, shaped links, CPU quotas, real raylets."""

from __future__ import annotations

from rayhive.cluster.testbed.config import TestbedConfig, TestbedNodes, load_testbed


__all__ = ["TestbedConfig", "TestbedNodes", "load_testbed"]
