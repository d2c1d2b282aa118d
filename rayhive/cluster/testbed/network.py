"""Namespaces, bridges and links of a testbed: a control plane for Ray and a data plane for peers.

Every node has two interfaces. ``ctl0`` is an unshaped link to a bridge in the machine's own
network, where the head and the drivers are. ``data0`` is the shaped link to the bridge in the
switch's namespace, which connects only the nodes.

Cuts are chains of the packet filter in the switch's namespace, one each, so that they add up and
are healed independently. They silently drop packets between nodes. The rules apply to every packet,
so established connections are cut too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.nftables.expressions import genex, ipv4addr, verdict

from rayhive.cluster.testbed import namespaces
from rayhive.cluster.testbed.namespaces import routes, tables
from rayhive.cluster.testbed.state import TestbedState
from rayhive.errors import ClusterError

CONTROL, DATA = "ctl0", "data0"
#: The bridge of the data plane, in the switch's namespace.
DATA_BRIDGE = "data"
_BITS = 24
_BRIDGE_FAMILY, _TABLE = 7, "rayhive"
_ACCEPT, _DROP = 1, 0


def port(index: int) -> str:
    """Return the name of the interface at the switch's end of a node's data link."""
    return f"dp{index}"


def find(ip: IPRoute, name: str) -> int | None:
    """Return the index of an interface, or None if there is none of this name."""
    found = ip.link_lookup(ifname=name)
    return int(found[0]) if found else None


def index_of(ip: IPRoute, name: str) -> int:
    """Return the index of an interface.

    Raises:
        OSError: There is none of this name.
    """
    found = find(ip, name)
    if found is None:
        raise OSError(f"no interface {name}")
    return found


def build(state: TestbedState) -> None:
    """Create all namespaces and links, without shaping them."""
    for namespace in (state.switch, *(node.namespace for node in state.nodes)):
        namespaces.create(namespace)
    namespaces.inside(None, lambda: _control_plane(state))
    namespaces.inside(state.switch, lambda: _data_plane(state))
    for node in state.nodes:
        _settle(state, node.namespace, node.control_address, node.data_address)


def remove(prefix: str, number: int) -> None:
    """Remove all present namespaces and links of a testbed."""
    for namespace in namespaces.named(prefix):
        namespaces.remove(namespace)

    def bridge() -> None:
        with routes() as ip:
            for link in ip.get_links():
                name = str(link.get("ifname"))
                if name == f"rht{number}" or name.startswith(prefix):
                    with contextlib.suppress(NetlinkError):  # removed with its other end
                        ip.link("del", index=link["index"])

    namespaces.inside(None, bridge)


def _control_plane(state: TestbedState) -> None:
    with routes() as ip:
        bridge = _bridge(ip, f"rht{state.number}", state.head_address)
        for node in state.nodes:
            _link(ip, bridge, node.namespace, CONTROL, node.namespace)


def _data_plane(state: TestbedState) -> None:
    with routes() as ip:
        ip.link("set", index=index_of(ip, "lo"), state="up")
        bridge = _bridge(ip, DATA_BRIDGE, state.data_gateway)
        for node in state.nodes:
            _link(ip, bridge, port(node.index), DATA, node.namespace, state.mtu)
        ip.link("set", index=bridge, address=_hardware(state.data_gateway))
        _add_neighbours(ip, bridge, [node.data_address for node in state.nodes])


def _bridge(ip: IPRoute, name: str, address: str) -> int:
    ip.link("add", ifname=name, kind="bridge")
    index = index_of(ip, name)
    ip.addr("add", index=index, address=address, prefixlen=_BITS)
    ip.link("set", index=index, state="up")
    return index


def _link(ip: IPRoute, bridge: int, name: str, far: str, namespace: str, mtu: int = 1500) -> None:
    with (namespaces.FOLDER / namespace).open("rb") as file:
        peer = {"ifname": far, "net_ns_fd": file.fileno()}
        ip.link("add", ifname=name, kind="veth", peer=peer)
    ip.link("set", index=index_of(ip, name), mtu=mtu, master=bridge, state="up")


def _settle(state: TestbedState, namespace: str, control: str, data: str) -> None:
    """Give the interfaces in a node's namespace their addresses."""

    def settle() -> None:
        with routes() as ip:
            ip.link("set", index=index_of(ip, "lo"), state="up")
            index = index_of(ip, CONTROL)
            ip.addr("add", index=index, address=control, prefixlen=_BITS)
            ip.link("set", index=index, state="up")
            ip.route("add", dst="default", gateway=state.head_address)
            index = index_of(ip, DATA)
            ip.addr("add", index=index, address=data, prefixlen=_BITS)
            ip.link("set", index=index, address=_hardware(data), mtu=state.mtu, state="up")
            others = [node.data_address for node in state.nodes if node.data_address != data]
            _add_neighbours(ip, index, [*others, state.data_gateway])

    namespaces.inside(namespace, settle)


def _hardware(address: str) -> str:
    """Return the Ethernet address for an address of the data plane."""
    return ":".join(["02", "00", *(f"{int(part):02x}" for part in address.split("."))])


def _add_neighbours(ip: IPRoute, index: int, addresses: Iterable[str]) -> None:
    """Add permanent neighbour entries to an interface.

    Without them the kernel repeats ARP requests now and then. They would count among the bytes on
    the link, and a lost request would cost a second.
    """
    for address in addresses:
        hardware = _hardware(address)
        ip.neigh("replace", dst=address, lladdr=hardware, ifindex=index, state="permanent")


# -- packet filter of the switch ------------------------------------------------------------------


def cut(switch: str, name: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Drop packets from the first to the second address of each pair.

    Args:
        switch: Namespace of the switch.
        name: Name of the cut; a cut of the same name is replaced.
        pairs: Pairs of source and destination addresses.

    Raises:
        ClusterError: The kernel refused a rule.
    """

    def do() -> None:
        with tables(_BRIDGE_FAMILY) as nft:
            nft.table("add", name=_TABLE)
            nft.chain("add", table=_TABLE, name=name, hook="forward", policy=_ACCEPT)
            nft.rule("del", table=_TABLE, chain=name)
            for source, target in pairs:
                match = ipv4addr(src=source, dst=target)
                steps = (match, [genex("counter", {})], verdict(code=_DROP))
                nft.rule("add", table=_TABLE, chain=name, expressions=steps)

    try:
        namespaces.inside(switch, do)
    except (NetlinkError, OSError) as error:
        raise ClusterError(f"the switch cannot cut: {error}") from error


def mend(switch: str, name: str) -> int:
    """Remove a cut, if there is one of this name; return the number of packets that it dropped."""

    def do() -> int:
        with tables(_BRIDGE_FAMILY) as nft:
            rules = [r for r in nft.get_rules() if r.get_attr("NFTA_RULE_CHAIN") == name]
            with contextlib.suppress(NetlinkError):
                nft.rule("del", table=_TABLE, chain=name)
                nft.chain("del", table=_TABLE, name=name)
        return sum(map(_dropped, rules))

    return namespaces.inside(switch, do)


def _dropped(rule: Any) -> int:
    """Return the number of packets that a rule dropped."""
    data = [
        expression.get_attr("NFTA_EXPR_DATA")
        for expression in rule.get_attr("NFTA_RULE_EXPRESSIONS")
        if expression.get_attr("NFTA_EXPR_NAME") == "counter"
    ]
    return sum(int(counter.get_attr("NFTA_COUNTER_PACKETS")) for counter in data)


def cuts(switch: str) -> list[str]:
    """Return the names of all present cuts."""

    def do() -> list[str]:
        with tables(_BRIDGE_FAMILY) as nft:
            return sorted(str(chain.get_attr("NFTA_CHAIN_NAME")) for chain in nft.get_chains())

    return namespaces.inside(switch, do)


def mend_all(switch: str, prefix: str) -> None:
    """Remove the cuts whose names begin with ``prefix``."""
    for name in cuts(switch):
        if name.startswith(prefix):
            mend(switch, name)
