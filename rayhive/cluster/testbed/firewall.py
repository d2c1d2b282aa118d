"""Packet filter of the switch: cuts that silently drop packets between nodes.

Each cut is a separate chain in the switch's namespace, so that cuts add up and are healed
independently. The rules apply to every packet, so established connections are cut too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.nftables.expressions import genex, ipv4addr, verdict

from rayhive.cluster.testbed import namespaces
from rayhive.cluster.testbed.namespaces import tables
from rayhive.errors import ClusterError

_BRIDGE_FAMILY, _TABLE = 7, "rayhive"
_ACCEPT, _DROP = 1, 0


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
