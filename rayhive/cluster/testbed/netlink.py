"""Netlink sockets that work with any event loop policy.

pyroute2 creates its loops by the policy of the process. In Ray's workers that is uvloop's, which
does not support netlink. So each socket gets a separate standard loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2 import IPRoute
from pyroute2.nftables.main import AsyncNFTables, NFTables


@contextmanager
def routes() -> Iterator[IPRoute]:
    """Open the interfaces, addresses and queueing disciplines of the current namespace."""
    with _own_loop() as loop, IPRoute(use_event_loop=loop) as ip:
        yield ip


@contextmanager
def tables(family: int) -> Iterator[NFTables]:
    """Open the packet filter's tables of one family in the current namespace."""
    with _own_loop() as loop, _Tables(family, loop) as opened:
        yield opened


@contextmanager
def _own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.SelectorEventLoop()
    try:
        yield loop
    finally:
        loop.run_until_complete(asyncio.sleep(0))  # runs the remaining callbacks of the socket
        loop.close()


class _Tables(NFTables):  # type: ignore[misc]
    """Packet filter's tables on a given loop."""

    def __init__(self, family: int, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncore = AsyncNFTables(nfgen_family=family)
        self.asyncore.use_event_loop = loop
        self.asyncore.local.keep_event_loop = True
        self.asyncore.event_loop.run_until_complete(self.asyncore.setup_endpoint())
