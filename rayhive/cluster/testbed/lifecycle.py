"""Creation, lookup and removal of testbeds, and of their single nodes.

A :class:`Testbed` ends with a block of code or with the process that made it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from rayhive.cluster import own_runs
from rayhive.cluster.address import named
from rayhive.cluster.embedded import environment
from rayhive.cluster.node import cgroups, process_group
from rayhive.cluster.node.processes import await_owner, start_reaper, started
from rayhive.cluster.testbed import (
    link_probe,
    namespaces,
    network,
    privilege,
    raylets,
    state,
    veth,
)
from rayhive.cluster.testbed.config import TestbedConfig
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError, ConfigError, Problem, RayhiveError, unknown
from rayhive.faults.node_tools import LinkMeasurement
from rayhive.spec import SwarmConfig

#: Last part of the addresses of node 0.
_FIRST_HOST = 10
#: Scheduling period of the nodes' CPU quotas [us].
_PERIOD_US = 100_000
_REAPER_TIMEOUT = 30.0


def up(
    config: TestbedConfig,
    owner: tuple[int, int] | None = None,
    ready: Callable[[int], None] | None = None,
    ray: bool = True,
) -> TestbedState:
    """Create a testbed.

    Args:
        config: The testbed.
        owner: Pid and start time of the process that the testbed ends with; None if it stays until
            it is taken down.
        ready: Called with the testbed's number before anything is created.
        ray: Whether to start Ray on it; without Ray, there are nodes and links only.

    Returns:
        The state of the testbed.

    Raises:
        ConfigError: A testbed of this name exists.
        ClusterError: This machine does not allow a testbed, or a part of it did not start.
    """
    privilege.require()
    clear_abandoned()
    if config.name in [each.name for each in state.testbeds()]:
        text = "a name that no testbed of this machine has; to remove that: rayhive testbed down"
        raise ConfigError(Problem("name", config.name, f"{text} {config.name}"))
    number = state.claim()
    try:
        if ready is not None:
            ready(number)
        made = _describe(config, number, owner)
        made.save()
        network.build(made)
        netem = namespaces.inside(made.switch, veth.kernel_delays)
        made = made.model_copy(update={"netem": netem, "head_port": raylets.free_port()})
        made.save()
        _make_groups(made)
        for node in made.nodes:
            veth.Veth(made, node).set(node.link)
        if ray:
            raylets.start_head(made)
            raylets.start_nodes(made, made.nodes)
        for node in made.nodes:
            limit_cpu(made, node, node.cpu_share)
    except BaseException:
        down(number)
        raise
    return made


def _describe(config: TestbedConfig, number: int, owner: tuple[int, int] | None) -> TestbedState:
    home = cgroups.home_of_testbeds()
    bare = TestbedState(
        number=number,
        name=config.name,
        mtu=config.mtu,
        nodes=(),
        groups=None if home is None else str(home / f"rht{number}"),
        owner=owner,
        environment=raylets.environment(),
    )
    described = []
    for index, (name, item) in enumerate(config.nodes):
        if item.cpu_share is not None and home is None:
            text = "absent: this machine has no writable control group for CPU time"
            raise ConfigError(Problem(f"node_classes.{name}.cpu_share", item.cpu_share, text))
        data = bare.data_address(_FIRST_HOST + index)
        described.append(
            NodeState(
                **{**dict(item), "labels": item.labels_of(name, index, data)},
                index=index,
                node_class=name,
                namespace=f"{bare.prefix}{index}",
                control_address=bare.control_address(_FIRST_HOST + index),
                data_address=data,
            )
        )
    return bare.model_copy(update={"nodes": tuple(described)})


def _make_groups(made: TestbedState) -> None:
    if made.groups is None:
        return
    top = Path(made.groups)
    top.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):  # version 1 has no such file
        cgroups.write(top, "cgroup.subtree_control", "+cpu")
    for place in (raylets.HEAD, *(str(node.index) for node in made.nodes)):
        (top / place).mkdir(exist_ok=True)


def down(number: int) -> bool:
    """Remove a testbed, or the remains of one, with everything that runs on it.

    Args:
        number: Number of the testbed.

    Returns:
        Whether nothing of it remains.
    """
    prefix, home = f"rht{number}-", cgroups.home_of_testbeds()
    group = None if home is None else home / f"rht{number}"
    places = namespaces.named(prefix)

    def everything() -> set[int]:
        found = {*namespaces.processes(places), *raylets.marked(state.folder_of(number))}
        return found if group is None else found | set(cgroups.members(group))

    namespaces.kill(everything)
    network.remove(prefix, number)
    if group is not None:
        cgroups.remove(group)
    folder = state.folder_of(number)
    for left in folder.glob(f"{process_group.DIRECTORY_PREFIX}*"):
        process_group.clear(left, patience=0.0)  # sockets and shared memory of dead peers
    return process_group.remove_tree(folder, state.FILE)


def find(name: str | None) -> TestbedState:
    """Return the testbed of this name, or the only one if ``name`` is None.

    Raises:
        ConfigError: There is no testbed of this name; or no name is given, and there is not
            exactly one testbed.
    """
    known = {each.name: each for each in state.testbeds()}
    if not known:
        text = "the name of a testbed; this machine has none. To make one: rayhive testbed up FILE"
        raise ConfigError(Problem("NAME", name, text))
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        raise ConfigError(unknown("NAME", name, known))
    return known[name]


def clear_abandoned() -> list[int]:
    """Remove testbeds without a living owner, and incomplete ones; return their numbers."""
    known = {each.number: each.abandoned for each in state.testbeds()}
    removed = [n for n in state.numbers() if known.get(n, state.stale(n))]
    for number in removed:
        down(number)
    return removed


def kill_node(folder: str | Path, index: int) -> list[int]:
    """Kill the raylet of a node and everything else on it. Works from any process.

    Args:
        folder: Folder of the testbed.
        index: Number of the node.

    Returns:
        The pids that were killed.
    """
    known = state.load(folder)
    node = known.node(index)
    killed = namespaces.kill(lambda: namespaces.processes([node.namespace]))
    network.mend_all(known.switch, prefix=f"{index}-")
    veth.Veth(known, node).cut_off()
    return killed


def start_node(folder: str | Path, index: int) -> None:
    """Start a node that was killed; return when Ray knows it. Works from any process.

    Args:
        folder: Folder of the testbed.
        index: Number of the node.

    Raises:
        ClusterError: The node runs, or does not start.
    """
    known = state.load(folder)
    node = known.node(index)
    if namespaces.processes([node.namespace]):
        raise ClusterError(f"node {index} of the testbed runs")
    limit_cpu(known, node, None)
    veth.Veth(known, node).set(node.link)
    raylets.start_nodes(known, [node])
    limit_cpu(known, node, node.cpu_share)


def limit_cpu(known: TestbedState, node: NodeState, cores: float | None) -> None:
    """Apply the CPU quota of a node. It follows the start, which a small quota would slow down."""
    if known.groups is not None:
        cgroups.limit(Path(known.groups) / str(node.index), cores, _PERIOD_US)


def alive(node: NodeState) -> bool:
    """Return whether a process runs on a node."""
    return bool(namespaces.processes([node.namespace]))


def measured(known: TestbedState) -> list[LinkMeasurement | None]:
    """Measure the links of all nodes in turn; None for a link that cannot be measured."""
    found: list[LinkMeasurement | None] = []
    for node in known.nodes:
        try:
            found.append(link_probe.measure_link(known, node, veth.Veth(known, node).now))
        except (OSError, RayhiveError):
            found.append(None)
    return found


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
        owner = (os.getpid(), started(os.getpid()) or 0)
        try:
            self._state = up(self._config, owner, partial(self._start_reaper, owner), self._ray)
        except BaseException:
            self._end_reaper()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        if self._state is not None:
            down(self._state.number)
        self._end_reaper()

    def _start_reaper(self, owner: tuple[int, int], number: int) -> None:
        self._reaper = start_reaper(__name__, number, *owner)

    def _end_reaper(self) -> None:
        reaper, self._reaper = self._reaper, None
        if reaper is not None and reaper.stdin is not None:
            reaper.stdin.close()
            reaper.wait(_REAPER_TIMEOUT)

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
        return kill_node(self.state.folder, index)

    def start_node(self, index: int) -> None:
        """Start a node that was killed, with its configured labels and link."""
        start_node(self.state.folder, index)

    def link(self, index: int) -> veth.Veth:
        """Return the data link of a node."""
        return veth.Veth(self.state, self.state.node(index))


@contextlib.contextmanager
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
        environment({**testbed.variables, own_runs.VARIABLE: str(testbed.state.folder)}),
    ):
        yield testbed.address


def main(number: int, *owner: int) -> None:
    """Wait for the end of a testbed's owner, then remove what remains of the testbed.

    Meanwhile another process may have made a testbed of the same number.
    """
    await_owner()
    with contextlib.suppress(ClusterError):  # nothing remains
        if state.load(state.folder_of(number)).owner == owner:
            down(number)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
