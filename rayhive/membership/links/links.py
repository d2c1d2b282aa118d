"""All links of one process: its listener, and a link to each member where one is possible."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from ipaddress import ip_address

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from rayhive.membership.event_loop import wait_at_most
from rayhive.membership.links.handshake import (
    HANDSHAKE_S,
    Invitation,
    Invitations,
    Opened,
    connect,
)
from rayhive.membership.links.link import Handler, Heard, Link, Reply, no_reply

logger = get_logger(__name__)

#: Longest wait for an invitation from a peer [s].
ASK_S = 5.0
#: Pause after an attempt that failed; a peer behind a firewall is reached through the daemon [s].
AGAIN_S = 30.0
#: Head start of the peer with the smaller id: the other one connects so much later [s].
LEAVE_S = 1.0
#: Longest wait of a round for the first attempt to connect to a peer [s].
FIRST_S = 2.0
#: Part of that wait after which this side connects in any case, as the other one may not know it
#: yet: peers that train do not connect to a peer that downloads its first state [s].
SOON_S = 0.3
#: Longest wait at the end for answers on their way: the last averages of a round, for example [s].
LINGER_S = 1.5
#: Time after which a task that has not ended is cancelled again [s].
CANCELLED_S = 0.05
#: Connections that may be in their handshake at the same time.
MOST_ARRIVING = 64


class Unreachable(ConnectionError):
    """The network daemon cannot connect to a peer."""


#: Asks a peer for an invitation, through the network daemon; raises :class:`Unreachable`.
Ask = Callable[[PeerID], Awaitable[Invitation]]
#: Called with :attr:`Links.parted` after a peer was added.
OnParted = Callable[[frozenset[PeerID]], Awaitable[None]]


async def nobody_asks(parted: frozenset[PeerID]) -> None:
    """Do nothing about peers that cannot be heard any more."""


class _Contact:
    """A peer, the links to it, and the task that keeps it linked.

    There are two links where both sides connected at the same time, or where only one side knows
    that an earlier one has ended. Each side uses its newest one.
    """

    def __init__(self) -> None:
        self.linked, self.tried = asyncio.Event(), asyncio.Event()
        self.needed = asyncio.Event()  # or linked
        self.keeping: asyncio.Task[None] | None = None
        self.over = False
        self.unreachable = False  # also for the network daemon
        self._links: list[Link] = []

    @property
    def was_linked(self) -> bool:
        """Whether there has been a link."""
        return bool(self._links)

    @property
    def link(self) -> Link | None:
        """The link for calls to the peer; None while there is none."""
        return next(reversed(self.open), None)

    @property
    def open(self) -> list[Link]:
        """The links that have not ended, the newest last."""
        return [link for link in self._links if link.wire.lost is None]

    def add(self, link: Link) -> None:
        """Note a new link; close it if the contact is over meanwhile."""
        if self.over:
            link.close()
            return
        self._links = [*self.open, link]
        self.linked.set()
        self.needed.set()

    def end(self) -> None:
        """Close all links, and begin no other."""
        self.over = True
        if self.keeping is not None:
            self.keeping.cancel()
        for link in self._links:
            link.close()


class Links:
    """Links of one process, on its event loop.

    Either side of a link may begin it, and both use it for their calls. After a failed attempt to
    connect to a peer, the next one follows after :data:`AGAIN_S`.

    Attributes:
        parted: Peers that are no members any more, and whose links have ended, or that cannot be
            reached.

    Args:
        own: This peer.
        handlers: Answers to calls, by method.
        ask: Asks a peer for an invitation.
        trusted_network: Whether connections to peers that agree do without encryption.
        heard: Called with a peer when data show that it lives.
        reply: Answers questions of peers.
        bulk: Whether the links carry bulk data, see :class:`Wire`.
        on_parted: Called after the link to a peer that is no member has ended, or the attempt to
            reach it has failed.
    """

    def __init__(
        self,
        own: PeerID,
        handlers: Mapping[str, Handler],
        ask: Ask,
        trusted_network: bool = False,
        heard: Heard = lambda peer: None,
        reply: Reply = no_reply,
        bulk: bool = True,
        on_parted: OnParted = nobody_asks,
    ) -> None:
        self._own, self._handlers, self._ask = own, handlers, ask
        self._heard, self._reply, self._bulk = heard, reply, bulk
        self._trusts, self._on_parted = trusted_network, on_parted
        self.parted: frozenset[PeerID] = frozenset()
        self._members: frozenset[PeerID] = frozenset()
        self._invitations = Invitations(trusted_network)
        self._addresses: tuple[tuple[str, int], ...] = ()
        self._listeners: list[socket.socket] = []
        self._contacts: dict[PeerID, _Contact] = {}
        self._arriving: set[asyncio.Task[None]] = set()

    def listen(self, hosts: Iterable[str]) -> None:
        """Accept connections at the addresses at which the network daemon is reached.

        An address that this machine does not have, such as that of a router, is announced all the
        same: the router may forward connections.
        """
        given = list(dict.fromkeys(hosts))
        for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            wanted = [h for h in given if (":" in h) == (family == socket.AF_INET6)]
            if not wanted:
                continue
            only_local = all(ip_address(host).is_loopback for host in wanted)
            with suppress(OSError):  # for example, no IPv6 here
                port = self._listen_at(family, wanted[0] if only_local else everywhere)
                self._addresses += tuple((host, port) for host in wanted)

    def _listen_at(self, family: socket.AddressFamily, host: str) -> int:
        listener = socket.create_server((host, 0), family=family, backlog=MOST_ARRIVING)
        listener.setblocking(False)
        self._listeners.append(listener)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)
        return int(listener.getsockname()[1])

    def invite(self, guest: PeerID) -> Invitation:
        """Return an invitation for a peer that asked for one through the network daemon."""
        return self._invitations.invite(guest.to_bytes(), self._addresses)

    def set_members(self, members: Collection[PeerID], lost: Collection[PeerID]) -> None:
        """Keep links to these peers, and end those to lost ones: a cut link gives no sign."""
        self._members = frozenset(members)
        self.parted -= self._members
        absent = [p for p, c in self._contacts.items() if p not in members and c.link is None]
        for peer in (*lost, *absent):
            self._drop(peer)
        for peer in members:
            if peer != self._own and peer not in lost:
                self._contact(peer)

    def round_trip(self) -> float:
        """Return the longest of the present links' shortest round trips; 0 without a link [s]."""
        links = [contact.link for contact in self._contacts.values()]
        trips = [link.wire.pace.round_trip() for link in links if link is not None]
        return max(filter(math.isfinite, trips), default=0.0)

    def ready(self, peer: PeerID) -> Link | None:
        """Return the link to a peer, if there is one now."""
        contact = self._contacts.get(peer)
        return None if contact is None else contact.link

    async def get(self, peer: PeerID) -> Link | None:
        """Return the link to a peer, or None; wait for a while for the first attempt."""
        contact = self._contact(peer)
        if contact.link is None and not contact.tried.is_set():
            await wait_at_most(contact.tried, SOON_S)
            contact.needed.set()
            await wait_at_most(contact.tried, FIRST_S - SOON_S)
            contact.tried.set()  # no second wait
        return contact.link

    async def close(self, unhurried: Collection[str] = ()) -> None:
        """End everything.

        Args:
            unhurried: Methods whose callers get all answers first, if they come within
                :data:`LINGER_S`.
        """
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        keeping = [c.keeping for c in self._contacts.values() if c.keeping is not None]
        await _end({*keeping, *self._arriving})
        links = [link for contact in self._contacts.values() for link in contact.open]
        answered = {asyncio.create_task(link.answered(unhurried)) for link in links}
        if answered:
            await _end((await asyncio.wait(answered, timeout=LINGER_S))[1])
        for peer in list(self._contacts):
            self._drop(peer)

    # -- links that this side begins ---------------------------------------------------------------

    def _contact(self, peer: PeerID) -> _Contact:
        if peer not in self._contacts:
            contact = self._contacts[peer] = _Contact()
            contact.keeping = asyncio.create_task(self._keep(peer, contact))
        return self._contacts[peer]

    def _drop(self, peer: PeerID) -> None:
        contact = self._contacts.pop(peer, None)
        if contact is not None:
            contact.end()
            self._note_end(peer, contact)

    def _note_end(self, peer: PeerID, contact: _Contact) -> bool:
        """Note whether a peer without a link has parted, and return it."""
        if peer in self._members or not (contact.was_linked or contact.unreachable):
            return False
        self.parted |= {peer}
        return True

    async def _keep(self, peer: PeerID, contact: _Contact) -> None:
        """Connect to a peer whenever there is no link to it."""
        while not contact.over:
            if contact.link is None and self._own > peer:
                await wait_at_most(contact.needed, LEAVE_S)
            if contact.link is None:
                try:
                    await self._dial(peer, contact)
                except Exception as error:
                    logger.debug(f"no link to {peer}, it is reached through p2pd: {error!r}")
                    contact.unreachable = isinstance(error, Unreachable)
                    if self._note_end(peer, contact):
                        await self._on_parted(self.parted)
                    elif self._own < peer:  # the other side connects next, which may succeed
                        await wait_at_most(contact.linked, 1.5 * LEAVE_S)
            contact.tried.set()
            if contact.link is None and not contact.over:
                await wait_at_most(contact.linked, AGAIN_S)
            contact.linked.clear()
            contact.needed.clear()
            while (link := contact.link) is not None:
                await link.ended.wait()
            if self._note_end(peer, contact):
                await self._on_parted(self.parted)

    async def _dial(self, peer: PeerID, contact: _Contact) -> None:
        invitation = await asyncio.wait_for(self._ask(peer), ASK_S)
        error: BaseException = ConnectionError("the peer has no addresses")
        for address in invitation.addresses:
            try:
                handshake = connect(invitation, address, self._trusts)
                opened = await asyncio.wait_for(handshake, HANDSHAKE_S)
                contact.add(self._linked(opened, peer, True))
            except (OSError, asyncio.TimeoutError) as failure:
                error = failure
                continue
            return
        raise error

    # -- links that the other side begins ----------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            if len(self._arriving) >= MOST_ARRIVING:
                connection.close()
                return
            arriving = asyncio.create_task(self._welcome(connection))
            self._arriving.add(arriving)
            arriving.add_done_callback(partial(self._arrived, connection))

    def _arrived(self, connection: socket.socket, arriving: asyncio.Task[None]) -> None:
        self._arriving.discard(arriving)
        if arriving.cancelled():  # perhaps before it began
            connection.close()

    async def _welcome(self, connection: socket.socket) -> None:
        try:
            handshake = self._invitations.accept(connection)
            opened, guest = await asyncio.wait_for(handshake, HANDSHAKE_S)
            peer = PeerID(guest)
            self._contact(peer).add(self._linked(opened, peer, False))
        except Exception as error:
            logger.debug(f"a connection was refused: {error!r}")
            connection.close()

    def _linked(self, opened: Opened, peer: PeerID, dialled: bool) -> Link:
        answers = (self._handlers, self._heard, self._reply)
        self.parted -= {peer}
        try:
            return Link(opened, peer, dialled, *answers, bulk=self._bulk)
        except OSError:  # the other side has gone meanwhile
            opened.connection.close()
            raise


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended: wait_for may lose a cancellation."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=CANCELLED_S)
