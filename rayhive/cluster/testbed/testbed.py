"""A testbed that ends with a block of code or with the process that made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

from rayhive.cluster.node import process_group
from rayhive.cluster.testbed import lifecycle, nodes, privilege, raylets, state, veth
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError

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
        owner = (pid, process_group.started(pid) or 0)
        self._state = lifecycle.up(self._config, owner, self._start_reaper, self._ray)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._state is not None:
            lifecycle.down(self._state.number)
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait(_REAPER_TIMEOUT)

    def _start_reaper(self, number: int) -> None:
        code = (
            "import sys; from rayhive.cluster.testbed.testbed import reap; reap(int(sys.argv[1]))"
        )
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": raylets.environment()["PYTHONPATH"]},
            cwd="/",
            start_new_session=True,
        )

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

    def capabilities(self) -> frozenset[str]:
        """Return the capabilities for faults that only a testbed has."""
        return frozenset(privilege.GIVEN)

    def kill_node(self, index: int) -> list[int]:
        """Kill the raylet of a node and everything else on it; return the pids."""
        return nodes.kill_node(self.state.folder, index)

    def start_node(self, index: int) -> None:
        """Start a node that was killed, with its configured labels and link."""
        nodes.start_node(self.state.folder, index)

    def link(self, index: int) -> veth.Veth:
        """Return the data link of a node."""
        return veth.Veth(self.state, self.state.node(index))


def reap(number: int) -> None:
    """Wait until the other end of stdin is closed, then remove what remains of a testbed.

    Args:
        number: Number of the testbed.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    if state.folder_of(number).exists():
        lifecycle.down(number)
