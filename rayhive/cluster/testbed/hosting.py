"""A testbed for as long as a driver needs one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rayhive.cluster.address import named
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.testbed import Testbed
from rayhive.config import SwarmConfig


@contextmanager
def hosted(
    swarm: SwarmConfig, needed: bool, address: str | None, later: int = 0
) -> Iterator[str | None]:
    """Yield the address of the cluster that a swarm runs on.

    Args:
        swarm: The swarm.
        needed: Whether it needs a testbed.
        address: What the user says; a cluster that he names is taken as it is.
        later: Peers that join those that start together.

    Raises:
        ClusterError: A testbed is needed, and there can be none on this machine.
    """
    if not needed or named(address) is not None:
        yield address
        return
    with (
        Testbed(TestbedConfig.of_swarm(swarm, "rayhive", spare=later)) as testbed,
        mock.patch.dict(os.environ, testbed.variables),
    ):
        yield testbed.address
