"""Stores and interfaces of baselines on nodes with IPv4 and with IPv6 addresses."""

from __future__ import annotations

import pytest

from rayhive.baselines.collectives import interface_of, listening_store, store_at
from rayhive.errors import PeerError
from tests.fixtures.network import needs_ipv6


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_members_meet_at_an_address_of_either_version(host: str) -> None:
    store, address = listening_store(host, 1, 5.0)
    store.set("key", "value")
    assert store_at(address, 1, 5.0).get("key") == b"value"
    assert interface_of(host) == "lo"


def test_an_address_of_another_machine_has_no_interface() -> None:
    with pytest.raises(PeerError, match=r"no network interface has the address 192\.0\.2\.1"):
        interface_of("192.0.2.1")
