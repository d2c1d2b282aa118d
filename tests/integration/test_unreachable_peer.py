"""Links to a peer whose network daemon has ended, by what the own daemon says of it."""

from __future__ import annotations

import asyncio

from hivemind.p2p import P2P

from rayhive.membership.peer_links import PeerLinks

#: Longest duration of the test [s].
LIMIT = 40.0


def test_a_peer_that_left_and_was_never_linked_has_parted_when_its_daemon_has_ended() -> None:
    async def body() -> None:
        told = asyncio.Event()

        async def tell(_: object) -> None:
            told.set()

        daemon = await P2P.create()
        gone = await P2P.create(initial_peers=await daemon.get_visible_maddrs())
        links = PeerLinks("link", True, on_parted=tell)
        await links.open(daemon)
        try:
            await gone.shutdown()
            assert await links.get(gone.peer_id) is None
            await told.wait()
            assert links.parted() == {gone.peer_id}
        finally:
            await links.close()
            await daemon.shutdown()

    asyncio.run(asyncio.wait_for(body(), LIMIT))
