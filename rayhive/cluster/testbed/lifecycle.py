"""A testbed: made, looked at, changed and removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rayhive.cluster.node import process_group
from rayhive.cluster.testbed import (
    firewall,
    link_probe,
    namespaces,
    network,
    privilege,
    quota,
    raylets,
    state,
    veth,
)
from rayhive.cluster.testbed.config import (
    CLASS_LABEL,
    DATA_ADDRESS_LABEL,
    NUMBER_LABEL,
    TestbedConfig,
    shape_labels,
)
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError, ConfigError, Problem, RayhiveError, unknown

_FIRST_HOST = 10
_BURIAL_TIMEOUT = 30.0


class Testbed:
    """A Ray cluster of shaped nodes on this machine.

    In a ``with`` block it ends with the block, or with this process, however that ends.

    Args:
        config: What it shall be.
        ray: Start Ray on it; without, there are nodes with links and nothing on them.
    """

    __test__: ClassVar[bool] = False

    def __init__(self, config: TestbedConfig, ray: bool = True) -> None:
        self._config, self._ray = config, ray
        self._state: TestbedState | None = None
        self._undertaker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Testbed:
        pid = os.getpid()
        owner = (pid, process_group.started(pid) or 0)
        self._state = up(self._config, owner, self._guard, self._ray)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._state is not None:
            down(self._state.number)
        if self._undertaker is not None and self._undertaker.stdin is not None:
            self._undertaker.stdin.close()
            self._undertaker.wait(_BURIAL_TIMEOUT)

    def _guard(self, number: int) -> None:
        """Have the testbed removed when this process is gone, also after a SIGKILL."""
        code = (
            "import sys; from rayhive.cluster.testbed.lifecycle import bury; bury(int(sys.argv[1]))"
        )
        self._undertaker = subprocess.Popen(
            [sys.executable, "-c", code, str(number)],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": raylets.environment()["PYTHONPATH"]},
            cwd="/",
            start_new_session=True,
        )

    @property
    def state(self) -> TestbedState:
        """What is known of it.

        Raises:
            ClusterError: It is not up.
        """
        if self._state is None:
            raise ClusterError("the testbed is not up")
        return self._state

    @property
    def address(self) -> str:
        """Address of the Ray cluster, for drivers."""
        return self.state.address

    @property
    def variables(self) -> dict[str, str]:
        """What a driver needs in its environment to be let in."""
        return raylets.driver_variables(self.state)

    @property
    def nodes(self) -> Sequence[NodeState]:
        """The nodes, without the head."""
        return self.state.nodes

    def capabilities(self) -> frozenset[str]:
        """Return what faults may do here that they may not do elsewhere."""
        return frozenset(privilege.GIVEN)

    def kill_node(self, index: int) -> list[int]:
        """Kill a node's raylet and everything else on it; return the pids."""
        return kill_node(self.state.folder, index)

    def start_node(self, index: int) -> None:
        """Start a node that was killed, with its labels and its link as they were made."""
        start_node(self.state.folder, index)

    def link(self, index: int) -> veth.Veth:
        """Return a node's data link."""
        return veth.Veth(self.state, self.state.node(index))


def up(
    config: TestbedConfig,
    owner: tuple[int, int] | None = None,
    ready: Callable[[int], None] | None = None,
    ray: bool = True,
) -> TestbedState:
    """Make a testbed.

    Args:
        config: What it shall be.
        owner: Pid and start of the process that it ends with; None to have it stay.
        ready: Called with the testbed's number before anything is made.
        ray: Start Ray on it; without, there are nodes with links and nothing on them.

    Returns:
        What is known of it.

    Raises:
        ConfigError: There is one of this name.
        ClusterError: This machine does not allow it, or something did not start.
    """
    privilege.require()
    clear_abandoned()
    if config.name in [each.name for each in state.testbeds()]:
        text = "a name that no testbed of this machine has; to remove it: rayhive testbed down"
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
        _groups(made)
        for node in made.nodes:
            veth.Veth(made, node).set(node.link)
        if ray:
            raylets.start_head(made)
            raylets.start_nodes(made, made.nodes)
        for node in made.nodes:
            _limit(made, node)  # last: a small share would make the start slow
    except BaseException:
        down(number)
        raise
    return made


def _describe(config: TestbedConfig, number: int, owner: tuple[int, int] | None) -> TestbedState:
    home = quota.home()
    bare = TestbedState(
        number=number,
        name=config.name,
        mtu=config.mtu,
        nodes=(),
        groups=None if home is None else str(home / f"rht{number}"),
        owner=owner,
        environment=raylets.environment(),
    )
    nodes = []
    for index, (name, item) in enumerate(config.nodes):
        if item.cpu_share is not None and home is None:
            text = "absent: this machine has no control group for CPU time that may be written"
            raise ConfigError(Problem(f"node_classes.{name}.cpu_share", item.cpu_share, text))
        data = bare.data_address(_FIRST_HOST + index)
        given = {CLASS_LABEL: name, NUMBER_LABEL: str(index), DATA_ADDRESS_LABEL: data}
        given |= shape_labels(item.link, item.cpu_share)
        nodes.append(
            NodeState(
                index=index,
                node_class=name,
                namespace=f"{bare.prefix}{index}",
                control_address=bare.control_address(_FIRST_HOST + index),
                data_address=data,
                labels={**item.labels, **given},
                num_cpus=item.num_cpus,
                cpu_share=item.cpu_share,
                link=item.link,
            )
        )
    return bare.model_copy(update={"nodes": tuple(nodes)})


def _groups(made: TestbedState) -> None:
    if made.groups is None:
        return
    top = Path(made.groups)
    quota.make(top)
    with contextlib.suppress(OSError):  # version 1 has no such file
        if (top / "cgroup.subtree_control").exists():
            (top / "cgroup.subtree_control").write_text("+cpu")
    for place in (raylets.HEAD, *(str(node.index) for node in made.nodes)):
        quota.make(top / place)


def _limit(made: TestbedState, node: NodeState) -> None:
    group = raylets.group(made, node)
    if group is not None:
        quota.limit(group, node.cpu_share)


def down(number: int) -> bool:
    """Remove a testbed with everything that runs on it; a part of one, or none, is fine.

    Returns:
        Whether nothing of it is left.
    """
    prefix, home = f"rht{number}-", quota.home()
    group = None if home is None else home / f"rht{number}"
    places = namespaces.named(prefix)

    def everything() -> set[int]:
        found = {*namespaces.processes(places), *raylets.marked(state.folder_of(number))}
        return found if group is None else found | set(quota.members(group))

    namespaces.kill(everything)
    network.remove(prefix, number)
    if group is not None:
        quota.remove(group)
    folder = state.folder_of(number)
    for left in folder.glob(f"{process_group.DIRECTORY_PREFIX}*"):
        process_group.clear(left, patience=0.0)  # sockets and shared memory of dead peers
    return process_group.remove_tree(folder, state.FILE)


def find(name: str | None) -> TestbedState:
    """Return the testbed of this name, or the only one if None is given.

    Raises:
        ConfigError: There is none, none of this name, or more than one and no name.
    """
    known = {each.name: each for each in state.testbeds()}
    if not known:
        text = "the name of a testbed, but this machine has none; make one: rayhive testbed up FILE"
        raise ConfigError(Problem("NAME", name, text))
    if name is not None and name not in known:
        raise ConfigError(unknown("NAME", name, known))
    if name is None and len(known) != 1:
        raise ConfigError(unknown("NAME", None, known))
    return known[name] if name is not None else next(iter(known.values()))


def clear_abandoned() -> list[int]:
    """Remove testbeds whose owners are gone, and what is left of ones; return their numbers."""
    known = {each.number: each.abandoned for each in state.testbeds()}
    removed = [n for n in state.numbers() if known.get(n, state.stale(n))]
    for number in removed:
        down(number)
    return removed


def bury(number: str) -> None:
    """Wait until the other end of stdin is closed, and remove what is left of a testbed."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    if state.folder_of(int(number)).exists():
        down(int(number))


def kill_node(folder: str | Path, index: int) -> list[int]:
    """Kill a node's raylet and everything else on it, from whatever process.

    Args:
        folder: The testbed's.
        index: The node.

    Returns:
        The pids that were killed.
    """
    known = state.load(folder)
    node = known.node(index)
    killed = namespaces.kill(lambda: namespaces.processes([node.namespace]))
    for name in firewall.cuts(known.switch):
        if name.startswith(f"{index}-"):
            firewall.mend(known.switch, name)
    veth.Veth(known, node).cut_off()
    return killed


def start_node(folder: str | Path, index: int) -> None:
    """Start a node that was killed, from whatever process; returns when Ray knows it.

    Raises:
        ClusterError: It does not start, or runs.
    """
    known = state.load(folder)
    node = known.node(index)
    if namespaces.processes([node.namespace]):
        raise ClusterError(f"node {index} of the testbed runs")
    group = raylets.group(known, node)
    if group is not None:
        quota.limit(group, None)
    veth.Veth(known, node).set(node.link)
    raylets.start_nodes(known, [node])
    _limit(known, node)


def alive(known: TestbedState, node: NodeState) -> bool:
    """Return whether anything runs on a node."""
    return bool(namespaces.processes([node.namespace]))


def measured(known: TestbedState) -> list[link_probe.Measured | None]:
    """Measure the links of all nodes, one after the other; None for one that can't be measured."""
    found: list[link_probe.Measured | None] = []
    for node in known.nodes:
        try:
            found.append(link_probe.measure_link(known, node, veth.Veth(known, node).now))
        except (OSError, RayhiveError):
            found.append(None)
    return found
