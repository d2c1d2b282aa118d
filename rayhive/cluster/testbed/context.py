"""A testbed for as long as a driver needs one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from rayhive.cluster.address import named
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.lifecycle import Testbed
from rayhive.spec import SwarmConfig


@contextmanager
def hosted(swarm: SwarmConfig, address: str | None, later: int = 0) -> Iterator[str | None]:
    """Yield the address of a testbed for a swarm.

    Args:
        swarm: The swarm.
        address: What the user says; a cluster that he names is taken as it is.
        later: Peers that join those that start together.

    Raises:
        ClusterError: There can be no testbed on this machine.
    """
    if named(address) is not None:
        yield address
        return
    with (
        Testbed(TestbedConfig.of_swarm(swarm, f"driver-{os.getpid()}", spare=later)) as testbed,
        mock.patch.dict(os.environ, testbed.variables),
    ):
        yield testbed.address
