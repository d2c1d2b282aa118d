"""Ways to the other members of a group: over a link where there is one, else through the daemon.

The daemon's messages are hivemind's, so that plain hivemind peers can take part. Over a link, parts
leave and arrive without protobuf.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.parts import Part, PartMessage, as_protobuf
from rayhive.averaging.streams import noted, until
from rayhive.averaging.timeouts import within
from rayhive.membership.links.link import Handler, Heard, Link, Packet
from rayhive.membership.peer_links import PeerLinks

#: A message of an exchange of parts, in either form.
Message: TypeAlias = PartMessage | averaging_pb2.AveragingData
#: Methods of a link: exchange of parts for averages, request to join a group, and for a state.
AGGREGATE, JOIN, DOWNLOAD = "aggregate_part", "join_group", "download_state"
#: Methods whose callers get all answers before a link ends.
UNHURRIED = (AGGREGATE, DOWNLOAD)

#: Returns the link to a peer, or None; it may wait for a while.
LinkTo = Callable[[PeerID], Awaitable[Link | None]]
#: Answers an exchange of parts: takes the sender's messages and the context of the call.
Aggregate = Callable[[AsyncIterator[Any], Any], AsyncGenerator[Any, None]]
#: Answers a request to join a group: takes hivemind's message and the context of the call.
Join = Callable[[Any, Any], AsyncIterator[Any]]
#: Answers a request for a state: takes hivemind's message and the context of the call.
Share = Callable[[Any, Any], AsyncIterator[Any]]


class Transport(Protocol):
    """Way to send parts to reducers."""

    async def aggregate(
        self, reducer: PeerID, parts: AsyncIterator[PartMessage], patience: float | None
    ) -> AsyncGenerator[Any, None]:
        """Send parts to a reducer.

        Args:
            reducer: The reducer.
            parts: The parts. They may leave before the answers are read.
            patience: Longest wait for the exchange to begin [s].

        Returns:
            The answers; closing the iterator ends the exchange.

        Raises:
            asyncio.TimeoutError: The exchange did not begin.
        """


class DaemonTransport:
    """Transport through the network daemon.

    Args:
        stub_of: Returns the remote side of a peer.
        heard: Called with a peer at each of its answers.
    """

    def __init__(self, stub_of: Callable[[PeerID], Any], heard: Heard = lambda peer: None) -> None:
        self._stub_of, self._heard = stub_of, heard

    async def aggregate(
        self, reducer: PeerID, parts: AsyncIterator[PartMessage], patience: float | None
    ) -> AsyncGenerator[Any, None]:
        """Send parts to a reducer; a daemon may wait for ever for a peer that died."""
        opening = self._stub_of(reducer).rpc_aggregate_part(as_protobuf(parts))
        answers = await within(patience, opening)
        return noted(answers, lambda: self._heard(reducer))


class DirectTransport:
    """Transport over links, and through the daemon to peers without one.

    Args:
        link_to: Returns the link to a peer, or None.
        daemon: The way through the daemon.
    """

    def __init__(self, link_to: LinkTo, daemon: Transport) -> None:
        self._link_to, self._daemon = link_to, daemon

    async def aggregate(
        self, reducer: PeerID, parts: AsyncIterator[PartMessage], patience: float | None
    ) -> AsyncGenerator[Any, None]:
        """Send parts to a reducer; over a link, they leave without waiting for the reducer."""
        link = await self._link_to(reducer)
        if link is None:
            return await self._daemon.aggregate(reducer, parts, patience)
        return aggregate_over(link, parts)


def aggregate_over(link: Link, parts: AsyncIterator[Message]) -> AsyncGenerator[Any, None]:
    """Send parts over a link; return the answers."""
    return _Answers(link, parts)  # type: ignore[return-value]  # all of it that is used


@dataclass(frozen=True)
class LinkCall:
    """Context of a call over a link, which loses nothing when the answering side ends it.

    Attributes:
        remote_id: The caller.
    """

    remote_id: PeerID


class _Answers:
    """Answers of a reducer at the other end of a link."""

    def __init__(self, link: Link, parts: AsyncIterator[Message]) -> None:
        self._call = link.call(AGGREGATE, packets(parts))

    def __aiter__(self) -> _Answers:
        return self

    async def __anext__(self) -> PartMessage:
        return message_of(await self._call.__anext__())

    async def aclose(self) -> None:
        """End the exchange."""
        await self._call.aclose()


def answering(aggregate: Aggregate) -> Handler:
    """Return the handler of exchanges over links.

    Args:
        aggregate: Answers an exchange.
    """

    async def answer(
        requests: AsyncIterator[Packet], sender: PeerID
    ) -> AsyncGenerator[Packet, None]:
        messages = (message_of(packet) async for packet in requests)
        async with aclosing(aggregate(messages, LinkCall(sender))) as answers:
            async for packet in packets(answers):
                yield packet

    return answer


async def packets(messages: AsyncIterator[Message]) -> AsyncGenerator[Packet, None]:
    """Pass messages on in the form in which they travel over a link."""
    try:
        async for message in messages:
            yield packet_of(message)
    finally:
        if isinstance(messages, AsyncGenerator):  # may note that all have left, or never will
            await messages.aclose()


def packet_of(message: Message) -> Packet:
    """Return the packet of a message."""
    part = message.tensor_part
    fields: list[Any] = [int(message.code), message.group_id, message.weight]
    if part is None or not part.dtype:  # an empty protobuf has no type
        return Packet(MSGPackSerializer.dumps(fields))
    fields += [part.compression, list(part.size), part.dtype, part.requires_grad, part.chunks]
    return Packet(MSGPackSerializer.dumps(fields), part.buffer)


def message_of(packet: Packet) -> PartMessage:
    """Return the message of a packet."""
    code, group_id, weight, *fields = MSGPackSerializer.loads(packet.head)
    if not fields:
        return PartMessage(code, None, group_id, weight)
    compression, size, dtype, requires_grad, chunks = fields
    part = Part(packet.body, compression, tuple(size), dtype, requires_grad, chunks)
    return PartMessage(code, part, group_id, weight)


class _Join:
    """Answers of a group leader at the other end of a link."""

    def __init__(self, link: Link, request: averaging_pb2.JoinRequest) -> None:
        self._call = link.call(JOIN, _one(Packet(request.SerializeToString())))

    def __aiter__(self) -> _Join:
        return self

    async def __anext__(self) -> averaging_pb2.MessageFromLeader:
        packet = await self._call.__anext__()
        return averaging_pb2.MessageFromLeader.FromString(packet.head)

    async def aclose(self) -> None:
        """End the request."""
        await self._call.aclose()


def join_over(
    link: Link, request: averaging_pb2.JoinRequest
) -> AsyncGenerator[averaging_pb2.MessageFromLeader, None]:
    """Ask a leader over a link to join its group; return its answers."""
    return _Join(link, request)  # type: ignore[return-value]  # all of it that is used


def leading(join: Join) -> Handler:
    """Return the handler of requests to join over links.

    Args:
        join: Answers a request.
    """

    async def answer(
        requests: AsyncIterator[Packet], follower: PeerID
    ) -> AsyncGenerator[Packet, None]:
        async for packet in requests:
            request = averaging_pb2.JoinRequest.FromString(packet.head)
            async for message in join(request, LinkCall(follower)):
                yield Packet(message.SerializeToString())
            return

    return answer


class StateSource:
    """State of a peer, over a link or through the daemon.

    Args:
        peer: The peer.
        link_to: Returns the link to a peer, or None.
        stub_of: Returns the remote side of a peer that is reached through the daemon.
        heard: Called with the peer at each message that comes through the daemon.
    """

    def __init__(
        self, peer: PeerID, link_to: LinkTo, stub_of: Callable[[PeerID], Any], heard: Heard
    ) -> None:
        self._peer, self._link_to, self._stub_of, self._heard = peer, link_to, stub_of, heard

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest
    ) -> AsyncGenerator[averaging_pb2.DownloadData, None]:
        """Return the messages with the peer's state; closing the iterator ends the download."""
        link = await self._link_to(self._peer)
        if link is not None:
            return until(_downloaded(link, request), lambda message: not message.ByteSize())
        messages = await self._stub_of(self._peer).rpc_download_state(request)
        return noted(messages, lambda: self._heard(self._peer))


async def _downloaded(
    link: Link, request: averaging_pb2.DownloadRequest
) -> AsyncGenerator[averaging_pb2.DownloadData, None]:
    packet = Packet(request.SerializeToString())
    async with aclosing(link.call(DOWNLOAD, _one(packet))) as answers:
        async for answer in answers:
            yield averaging_pb2.DownloadData.FromString(bytes(answer.body))


def sharing(share: Share) -> Handler:
    """Return the handler of requests for a state over links.

    Args:
        share: Answers a request.
    """

    async def answer(
        requests: AsyncIterator[Packet], guest: PeerID
    ) -> AsyncGenerator[Packet, None]:
        async for packet in requests:
            request = averaging_pb2.DownloadRequest.FromString(packet.head)
            async for message in share(request, LinkCall(guest)):
                yield Packet(b"", message.SerializeToString())
            return

    return answer


def handlers(aggregate: Aggregate, join: Join, share: Share) -> dict[str, Handler]:
    """Return the handlers of an averager's links, by method.

    Args:
        aggregate: Answers an exchange of parts.
        join: Answers a request to join a group.
        share: Answers a request for a state.
    """
    return {AGGREGATE: answering(aggregate), JOIN: leading(join), DOWNLOAD: sharing(share)}


def way(links: PeerLinks, stub_of: Callable[[PeerID], Any]) -> Transport:
    """Return the way to the other peers.

    Args:
        links: Links of the averager.
        stub_of: Returns the remote side of a peer that is reached through the daemon.
    """
    return DirectTransport(links.get, DaemonTransport(stub_of, links.heard))


def states(links: PeerLinks, stub_of: Callable[[PeerID], Any]) -> Callable[[PeerID], StateSource]:
    """Return the source of each peer's state; the arguments are those of :func:`way`."""
    return partial(StateSource, link_to=links.get, stub_of=stub_of, heard=links.heard)


async def no_link(peer: PeerID) -> Link | None:
    """Return None: this peer has no links."""
    return None


async def _one(packet: Packet) -> AsyncGenerator[Packet, None]:
    yield packet
