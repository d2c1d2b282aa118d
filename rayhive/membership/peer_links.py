"""Links of one process of a peer to those of other peers, agreed through the network daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, PeerID
from hivemind.utils import MSGPackSerializer

from rayhive.membership.daemon_calls import keep_answering
from rayhive.membership.links.handshake import Invitation
from rayhive.membership.links.link import Handler, Link, Reply, no_reply
from rayhive.membership.links.links import Links, OnParted, Unreachable, nobody_asks
from rayhive.membership.signs import SignsOfLife

#: What the daemon says of a peer that it cannot connect to.
CANNOT_DIAL = "failed to dial"
#: Longest wait at shutdown for the daemon [s].
REMOVAL_S = 0.5


class PeerLinks:
    """Links of one process of a peer, from its start to its shutdown.

    Processes of one kind invite each other with a message of their own, which plain hivemind peers
    do not know: these are reached through the daemon.

    Args:
        name: Name of the message; equal for processes that link.
        serves: Whether other peers can call this one through the daemon.
        trusted_network: Whether links to peers that agree do without encryption.
        signs: Notes when data show that a peer lives, whichever way they came.
        on_parted: As for :class:`Links`.
        bulk: Whether the links carry bulk data, which leave this machine after other messages.
    """

    def __init__(
        self,
        name: str,
        serves: bool,
        trusted_network: bool = False,
        signs: SignsOfLife | None = None,
        on_parted: OnParted = nobody_asks,
        bulk: bool = True,
    ) -> None:
        keep_answering()
        self._name, self._serves, self._trusted = name, serves, trusted_network
        self._signs, self._on_parted, self._bulk = signs, on_parted, bulk
        self._links: Links | None = None
        self._known: tuple[frozenset[bytes], ...] = ()
        self._p2p: P2P

    async def open(
        self,
        p2p: P2P,
        handlers: Mapping[str, Handler] = MappingProxyType({}),
        reply: Reply = no_reply,
    ) -> None:
        """Listen, and answer peers that ask for an invitation; does nothing the second time.

        Args:
            p2p: Connection to the daemon.
            handlers: Answers to calls, by method.
            reply: Answers to questions.
        """
        if self._links is not None:
            return
        self._p2p = p2p
        answers = (self.heard, reply, self._bulk, self._on_parted)
        self._links = Links(p2p.peer_id, handlers, self._ask, self._trusted, *answers)
        if self._serves:
            self._links.listen(hosts_in(map(str, await p2p.get_visible_maddrs())))
            await p2p.add_protobuf_handler(self._name, self._answer, BytesValue)

    def heard(self, peer: PeerID) -> None:
        """Note that a peer lives."""
        if self._signs is not None:
            self._signs.note(peer.to_bytes())

    def set_members(self, members: Iterable[bytes], lost: Iterable[bytes]) -> None:
        """Keep links to the members, and end those to lost peers; both are given by their ids."""
        known = frozenset(members), frozenset(lost)
        if self._links is not None and known != self._known:  # most calls tell of progress only
            self._known = known
            self._links.set_members(*([PeerID(peer) for peer in peers] for peers in known))

    def parted(self) -> frozenset[PeerID]:
        """Return the peers that are no members any more, and that cannot be heard."""
        return frozenset() if self._links is None else self._links.parted

    def round_trip(self) -> float:
        """Return the longest of the links' round trips; 0 without a link [s]."""
        return 0.0 if self._links is None else self._links.round_trip()

    def ready(self, peer: PeerID) -> Link | None:
        """Return the link to a peer, if there is one now."""
        return None if self._links is None else self._links.ready(peer)

    async def get(self, peer: PeerID) -> Link | None:
        """Return the link to a peer; None if it is reached through the daemon only."""
        return None if self._links is None else await self._links.get(peer)

    async def close(self, unhurried: Collection[str] = ()) -> None:
        """End all links, and answer no more requests for invitations.

        Args:
            unhurried: Methods whose callers get all answers first.
        """
        links, self._links = self._links, None
        if links is not None:
            await links.close(unhurried)
            if self._serves:
                with suppress(Exception):  # the daemon may have ended
                    removal = self._p2p.remove_protobuf_handler(self._name)
                    await asyncio.wait_for(removal, REMOVAL_S)

    async def _ask(self, peer: PeerID) -> Invitation:
        question = BytesValue()
        try:
            answer = await self._p2p.call_protobuf_handler(peer, self._name, question, BytesValue)
        except P2PDaemonError as error:
            if CANNOT_DIAL in str(error):
                raise Unreachable(str(error)) from error
            raise
        return Invitation.of(MSGPackSerializer.loads(answer.value))

    async def _answer(self, question: BytesValue, context: P2PContext) -> BytesValue:
        if self._links is None:
            raise ConnectionError("this process ends")
        invitation = self._links.invite(context.remote_id)
        return BytesValue(value=MSGPackSerializer.dumps(invitation.fields()))


def hosts_in(addresses: Iterable[str]) -> list[str]:
    """Return the hosts in multiaddresses at which connections arrive without a relay."""
    places = [address.split("/") for address in addresses if "/p2p-circuit" not in address]
    return [parts[2] for parts in places if parts[1] in ("ip4", "ip6")]
