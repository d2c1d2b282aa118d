"""Data link of one node: rate, delay and loss, which can change at any time."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from rayhive.cluster.testbed import namespaces, network, relay
from rayhive.cluster.testbed.namespaces import routes
from rayhive.cluster.testbed.state import NodeState, TestbedState, write_private
from rayhive.errors import ClusterError
from rayhive.spec import Link

_TOP, _ROOT, _CHILD, _CHILD_PARENT = 0xFFFFFFFF, 0x10000, 0x20000, 0x10001
_NETEM_PACKETS = 50_000
#: Longest queue of a link [s], and its smallest size [bytes].
_QUEUE_S, _QUEUE_BYTES = 0.1, 64_000
_RELAY_TIMEOUT = 10.0


def kernel_delays() -> bool:
    """Return whether the kernel has netem, by a trial in the current network namespace."""
    with routes() as ip:
        index = network.index_of(ip, "lo")
        try:
            ip.tc("add", "netem", index, _ROOT, delay=1000)
        except NetlinkError:
            return False
        ip.tc("del", None, index, _ROOT, parent=_TOP)
        return True


class Veth:
    """The link between a node and the switch.

    The rate is shaped at the sending interface of each direction: the node's for packets from the
    node, and the switch's for packets to the node. Delay and loss are set in the same places by
    netem, or without netem by a relay between the switch's end of the link and the switch.

    Args:
        state: The testbed.
        node: The node.
    """

    def __init__(self, state: TestbedState, node: NodeState) -> None:
        self._state, self._node = state, node
        self._port = network.port(node.index)
        # the relay's two interfaces, and the bridge from one of them to the port
        self._names = f"rn{node.index}", f"rs{node.index}", f"rb{node.index}"
        self._now = state.folder / f"link-{node.index}.json"
        self._settings = state.folder / f"relay-{node.index}"

    @property
    def now(self) -> Link:
        """The present shape of the link."""
        try:
            return Link.model_validate_json(self._now.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return self._node.link

    def set(self, link: Link) -> None:
        """Shape the link; packets in transit may be lost.

        Raises:
            ClusterError: The kernel refused the shape.
        """
        with self._locked():
            self._set(link)

    def update(self, **fields: float | None) -> tuple[Link, Link]:
        """Change some fields of the shape, safely with other processes that change other fields.

        Args:
            fields: Fields of :class:`~rayhive.spec.Link` with their new values.

        Returns:
            The shape before and after.

        Raises:
            ClusterError: The kernel refused the shape.
        """
        with self._locked():
            before = self.now
            after = Link.model_validate({**before.model_dump(), **fields})
            self._set(after)
            return before, after

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the link against other processes and threads."""
        with self._now.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _set(self, link: Link) -> None:
        netem = self._state.netem
        ends = ((self._node.namespace, network.DATA), (self._state.switch, self._port))
        try:
            for namespace, name in ends:
                apply = functools.partial(shape, name, link, netem, self._state.mtu)
                namespaces.inside(namespace, apply)
            if not netem:
                self._delay(link)
        except (NetlinkError, OSError) as error:
            raise ClusterError(f"node {self._node.index}: its link: {error}") from error
        write_private(self._now, link.model_dump_json())

    def counters(self) -> dict[str, int]:
        """Return the counters of the node's interface since its creation.

        Returns:
            ``rx_bytes``, ``tx_bytes``, ``rx_packets``, ``tx_packets``, and ``dropped``: packets
            that the shapers dropped in both directions.
        """
        near = namespaces.inside(self._node.namespace, lambda: _statistics(network.DATA))
        far = namespaces.inside(self._state.switch, lambda: _statistics(self._port))
        return {**near, "dropped": near["dropped"] + far["dropped"]}

    def relays(self) -> list[int]:
        """Return the pid of the relay, if there is one."""
        found = []
        for pid in namespaces.processes([self._state.switch]):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if str(self._settings).encode() in line:
                    found.append(pid)
        return found

    def cut_off(self) -> None:
        """End the relay, if there is one, when the node ends."""
        self._signal_relay(signal.SIGKILL)

    def _signal_relay(self, number: signal.Signals) -> bool:
        """Send a signal to the relay; return whether there is one."""
        relays = self.relays()
        for pid in relays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(relays)

    def _delay(self, link: Link) -> None:
        """Insert the relay, change its settings, or remove it."""
        write_private(self._settings, link.model_dump_json())
        if not (link.delay_ms or link.loss):
            namespaces.inside(self._state.switch, self._remove_relay)
        elif not self._signal_relay(signal.SIGHUP):
            namespaces.inside(self._state.switch, self._insert_relay)

    def _insert_relay(self) -> None:
        self._remove_relay()
        near, far, joint = self._names
        groups = self._state.groups
        outside = "" if groups is None else str(Path(groups).parent / "cgroup.procs")
        command = [sys.executable, relay.__file__, str(self._settings), near, far, outside]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RELAY_TIMEOUT)
        if done.returncode:
            raise OSError(f"the relay did not start: {done.stderr.strip()[-400:]}")
        with routes() as ip:
            ip.link("add", ifname=joint, kind="bridge")
            bridge = network.index_of(ip, joint)
            ip.link("set", index=bridge, state="up")
            switch = network.index_of(ip, network.DATA_BRIDGE)
            mtu = self._state.mtu
            for name, master in ((near, bridge), (far, switch), (self._port, bridge)):
                index = network.index_of(ip, name)
                ip.link("set", index=index, mtu=mtu, master=master, state="up")

    def _remove_relay(self) -> None:
        with routes() as ip:
            switch = network.index_of(ip, network.DATA_BRIDGE)
            ip.link("set", index=network.index_of(ip, self._port), master=switch)
            self.cut_off()
            joint = network.find(ip, self._names[2])
            if joint is not None:
                ip.link("del", index=joint)


def shape(name: str, link: Link, netem: bool, mtu: int) -> None:
    """Shape the packets that leave through an interface of the current network namespace.

    Args:
        name: Name of the interface.
        link: The shape.
        netem: Whether the kernel has netem.
        mtu: Largest packet [bytes].
    """
    with routes() as ip:
        index = network.index_of(ip, name)
        delayed = netem and bool(link.delay_ms or link.loss)
        present = _root_kind(ip, index)
        if delayed or link.rate_mbit is None or present not in (None, "tbf"):
            if present is not None:
                ip.tc("del", None, index, _ROOT, parent=_TOP)
            present = None
        if delayed:
            delay, loss = round(link.delay_ms * 1e3), link.loss * 100
            ip.tc("add", "netem", index, _ROOT, delay=delay, loss=loss, limit=_NETEM_PACKETS)
        if link.rate_mbit is not None:
            handle, parent = (_CHILD, _CHILD_PARENT) if delayed else (_ROOT, _TOP)
            rate = round(link.rate_mbit * 1e6 / 8)
            burst = 2 * (mtu + 100)
            limit = round(max(_QUEUE_BYTES, link.rate_mbit * 1e6 / 8 * _QUEUE_S)) + burst
            do = "add" if present is None else "change"
            ip.tc(do, "tbf", index, handle, parent=parent, rate=rate, burst=burst, limit=limit)


def _root_kind(ip: IPRoute, index: int) -> str | None:
    """Return the kind of the queueing discipline set on an interface; None if there is none."""
    for qdisc in ip.get_qdiscs(index=index):
        if qdisc["parent"] == _TOP and qdisc["handle"]:
            return str(qdisc.get_attr("TCA_KIND"))
    return None


def _statistics(name: str) -> dict[str, int]:
    """Return the counters of an interface; ``dropped`` counts the packets dropped by its shaper."""
    with routes() as ip:
        index = network.index_of(ip, name)
        values = next(iter(ip.get_links(index))).get_attr("IFLA_STATS64")
        shapers = [qdisc.get_attr("TCA_STATS") for qdisc in ip.get_qdiscs(index=index)]
        counters = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets")
        return {
            **{key: int(values[key]) for key in counters},
            "dropped": sum(int(found["drop"]) for found in shapers if found is not None),
        }
