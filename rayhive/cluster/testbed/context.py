"""Testbed of a driver that needs shaped nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rayhive.cluster.address import named
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.testbed import Testbed
from rayhive.spec import SwarmConfig


@contextmanager
def hosted(swarm: SwarmConfig, address: str | None, later: int = 0) -> Iterator[str | None]:
    """Yield the address of a testbed for a swarm, which lives as long as the block.

    Args:
        swarm: The swarm.
        address: Address that the user gave; if it names a cluster, it is yielded unchanged.
        later: Number of peers that join later.

    Raises:
        ClusterError: This machine does not allow a testbed.
    """
    if named(address) is not None:
        yield address
        return
    with (
        Testbed(TestbedConfig.of_swarm(swarm, f"driver-{os.getpid()}", spare=later)) as testbed,
        mock.patch.dict(os.environ, testbed.variables),
    ):
        yield testbed.address
