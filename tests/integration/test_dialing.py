"""Ports from which the network daemons of real peers dial."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.network import needs_ipv6
from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]


def dial(host: str = "127.0.0.1") -> dict[str, Any]:
    """Let one daemon dial another one, and return the ports of its sockets."""
    import psutil

    from rayhive.strategy.dht import meet, start_on_host

    called, caller = (start_on_host(host) for _ in range(2))
    meet(caller, [str(address) for address in called.get_visible_maddrs()])
    ports: dict[str, list[int]] = {"listens": [], "dials": []}
    for process in psutil.Process(caller.pid).children(recursive=True):
        for each in process.net_connections("tcp"):
            listens = each.status == psutil.CONN_LISTEN
            ports["listens" if listens else "dials"].append(each.laddr.port)
    caller.shutdown()
    called.shutdown()
    return ports


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_daemon_does_not_dial_from_the_port_on_which_it_listens(host: str) -> None:
    """Two peers that dial each other at the same time would get one connection that fails."""
    ports = call(dial, host=host).result()
    assert ports["listens"] and ports["dials"]
    assert not set(ports["listens"]) & set(ports["dials"])
