"""Netlink sockets that work beside any event loop.

pyroute2 makes its loops by the process's policy. Ray's workers have that of uvloop, which knows
nothing of netlink, so each socket gets a plain loop of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pyroute2 import IPRoute
from pyroute2.nftables.main import AsyncNFTables, NFTables


@contextmanager
def routes() -> Iterator[IPRoute]:
    """Open the interfaces, addresses and queueing disciplines of the present namespace."""
    with _own_loop() as loop, IPRoute(use_event_loop=loop) as ip:
        yield ip


@contextmanager
def tables(family: int) -> Iterator[NFTables]:
    """Open the packet filter's tables of one family in the present namespace."""
    with _own_loop() as loop, _Tables(family, loop) as opened:
        yield opened


@contextmanager
def _own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.SelectorEventLoop()
    try:
        yield loop
    finally:
        loop.run_until_complete(asyncio.sleep(0))  # closes what the socket has left to close
        loop.close()


class _Tables(NFTables):  # type: ignore[misc]
    """The same, with a loop that is given."""

    def __init__(self, family: int, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncore = AsyncNFTables(nfgen_family=family)
        self.asyncore.use_event_loop = loop
        self.asyncore.local.keep_event_loop = True
        self.asyncore.event_loop.run_until_complete(self.asyncore.setup_endpoint())
