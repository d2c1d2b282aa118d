"""A testbed that ends with a block of code or with the process that made it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from rayhive.cluster.address import named
from rayhive.cluster.embedded import environment
from rayhive.cluster.node.processes import await_owner, start_reaper, started
from rayhive.cluster.testbed import lifecycle, raylets, state, veth
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError
from rayhive.spec import SwarmConfig

_REAPER_TIMEOUT = 30.0


class Testbed:
    """A Ray cluster of shaped nodes on this machine, for use in a ``with`` block.

    The testbed ends with the block. If this process ends before, even by SIGKILL, a reaper process
    removes the testbed.

    Args:
        config: The testbed.
        ray: Whether to start Ray on it; without Ray, there are nodes and links only.
    """

    __test__: ClassVar[bool] = False

    def __init__(self, config: TestbedConfig, ray: bool = True) -> None:
        self._config, self._ray = config, ray
        self._state: TestbedState | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Testbed:
        pid = os.getpid()
        owner = (pid, started(pid) or 0)
        self._state = lifecycle.up(self._config, owner, self._start_reaper, self._ray)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._state is not None:
            lifecycle.down(self._state.number)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(_REAPER_TIMEOUT)

    def _start_reaper(self, number: int) -> None:
        self._reaper = start_reaper(__name__, str(number))

    @property
    def state(self) -> TestbedState:
        """Description of the running testbed.

        Raises:
            ClusterError: The testbed is not up.
        """
        if self._state is None:
            raise ClusterError("the testbed is not up")
        return self._state

    @property
    def address(self) -> str:
        """Address of the Ray cluster."""
        return self.state.address

    @property
    def variables(self) -> dict[str, str]:
        """Variables that a driver needs in its environment to connect."""
        return raylets.driver_variables(self.state)

    @property
    def nodes(self) -> Sequence[NodeState]:
        """The nodes, without the head."""
        return self.state.nodes

    @property
    def reaper(self) -> int | None:
        """Process id of the reaper; None if the testbed is not up."""
        return None if self._reaper is None else self._reaper.pid

    def kill_node(self, index: int) -> list[int]:
        """Kill the raylet of a node and everything else on it; return the pids."""
        return lifecycle.kill_node(self.state.folder, index)

    def start_node(self, index: int) -> None:
        """Start a node that was killed, with its configured labels and link."""
        lifecycle.start_node(self.state.folder, index)

    def link(self, index: int) -> veth.Veth:
        """Return the data link of a node."""
        return veth.Veth(self.state, self.state.node(index))


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
        environment(testbed.variables),
    ):
        yield testbed.address


def main(number: int) -> None:
    """Wait for the end of the testbed's process, then remove what remains of the testbed."""
    await_owner()
    if state.folder_of(number).exists():
        lifecycle.down(number)


if __name__ == "__main__":
    main(int(sys.argv[1]))
