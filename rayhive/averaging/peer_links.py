"""Links of an averager, agreed with the other averagers through the network daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.links.handshake import Invitation
from rayhive.averaging.links.link import Handler, Link
from rayhive.averaging.links.links import Links
from rayhive.averaging.transport import (
    AGGREGATE,
    DOWNLOAD,
    JOIN,
    Aggregate,
    DaemonTransport,
    DirectTransport,
    Join,
    Share,
    StateSource,
    Transport,
    answering,
    leading,
    sharing,
)
from rayhive.membership.signs import SignsOfLife
from rayhive.membership.view import Member

#: Longest wait at shutdown for the daemon [s].
REMOVAL_S = 0.5


class PeerLinks:
    """Links of one averager, from its start in the averager's process to its shutdown.

    Averagers invite each other with a message of their own, which plain hivemind peers do not know:
    these are reached through the daemon.

    Args:
        name: Name of the message; equal for averagers that average with each other.
        serves: Whether other peers can call this one through the daemon.
        trusted_network: Whether links to peers that agree do without encryption.
        signs: Notes when data show that a peer lives, whichever way they came.
    """

    def __init__(
        self,
        name: str,
        serves: bool,
        trusted_network: bool = False,
        signs: SignsOfLife | None = None,
    ) -> None:
        self._name, self._serves, self._trusted = name, serves, trusted_network
        self._signs = SignsOfLife() if signs is None else signs
        self._links: Links | None = None
        self._known: tuple[frozenset[bytes], ...] = ()
        self._p2p: P2P

    async def open(
        self,
        p2p: P2P,
        aggregate: Aggregate | None = None,
        join: Join | None = None,
        share: Share | None = None,
    ) -> None:
        """Listen, and answer peers that ask for an invitation; does nothing the second time.

        Args:
            p2p: Connection to the daemon.
            aggregate: Answers an exchange of parts.
            join: Answers a request to join a group.
            share: Answers a request for a state.
        """
        if self._links is not None:
            return
        self._p2p = p2p
        handlers: dict[str, Handler] = {}
        if aggregate is not None:
            handlers[AGGREGATE] = answering(aggregate)
        if join is not None:
            handlers[JOIN] = leading(join)
        if share is not None:
            handlers[DOWNLOAD] = sharing(share)
        self._links = Links(p2p.peer_id, handlers, self._ask, self._trusted, self.heard)
        if self._serves:
            self._links.listen(hosts_in(map(str, await p2p.get_visible_maddrs())))
            await p2p.add_protobuf_handler(self._name, self._answer, BytesValue)

    def heard(self, peer: PeerID) -> None:
        """Note that a peer lives."""
        self._signs.note(peer.to_bytes())

    def set_members(self, members: Sequence[Member], lost: Iterable[bytes]) -> None:
        """Keep links to the members, and end those to lost peers."""
        known = frozenset(member.peer_id for member in members), frozenset(lost)
        if self._links is not None and known != self._known:  # most calls tell of progress only
            self._known = known
            self._links.set_members(*([PeerID(peer) for peer in peers] for peers in known))

    async def get(self, peer: PeerID) -> Link | None:
        """Return the link to a peer; None if it is reached through the daemon only."""
        return None if self._links is None else await self._links.get(peer)

    def transport(self, stub_of: Callable[[PeerID], Any]) -> Transport:
        """Return the way to the other peers.

        Args:
            stub_of: Returns the remote side of a peer that is reached through the daemon.
        """
        return DirectTransport(self.get, DaemonTransport(stub_of, self.heard))

    def source(self, peer: PeerID, stub_of: Callable[[PeerID], Any]) -> StateSource:
        """Return the way to download a peer's state; for ``stub_of`` see :meth:`transport`."""
        return StateSource(peer, self.get, stub_of, self.heard)

    async def close(self) -> None:
        """End all links, and answer no more requests for invitations."""
        links, self._links = self._links, None
        if links is not None:
            await links.close((AGGREGATE, DOWNLOAD))
            if self._serves:
                with suppress(Exception):  # the daemon may have ended
                    removal = self._p2p.remove_protobuf_handler(self._name)
                    await asyncio.wait_for(removal, REMOVAL_S)

    async def _ask(self, peer: PeerID) -> Invitation:
        question = BytesValue()
        answer = await self._p2p.call_protobuf_handler(peer, self._name, question, BytesValue)
        return Invitation.of(MSGPackSerializer.loads(answer.value))

    async def _answer(self, question: BytesValue, context: P2PContext) -> BytesValue:
        if self._links is None:
            raise ConnectionError("this averager ends")
        invitation = self._links.invite(context.remote_id)
        return BytesValue(value=MSGPackSerializer.dumps(invitation.fields()))


def hosts_in(addresses: Iterable[str]) -> list[str]:
    """Return the hosts in multiaddresses at which connections arrive without a relay."""
    places = [address.split("/") for address in addresses if "/p2p-circuit" not in address]
    return [parts[2] for parts in places if parts[1] in ("ip4", "ip6")]
