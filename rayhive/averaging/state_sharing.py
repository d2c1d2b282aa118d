"""States of peers in the DHT: their announcement, and access to the states of other peers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import Any

from hivemind.compression import deserialize_tensor_stream
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time, get_logger
from hivemind.utils.asyncio import aiter_with_timeout

from rayhive.averaging.state_digest import Digest, digest_in
from rayhive.averaging.state_download import State

logger = get_logger(__name__)

#: Longest wait for the list of peers that share their state [s].
ASK_S = 10.0
#: Shortest time between two announcements of this peer's state [s].
DECLARE_PAUSE_S = 1.0


def sharing_key(prefix: str) -> str:
    """Return the key under which the averagers of a prefix announce their states."""
    return f"{prefix}.all_averagers"


async def declare_state(
    dht: DHT, key: str, priority: Callable[[], float | None], changed: asyncio.Event, period: float
) -> None:
    """Announce this peer's state in the DHT, on each change and once per period, for ever.

    hivemind announces after every averaged tensor, several times a round; here announcements are
    at least :data:`DECLARE_PAUSE_S` apart.

    Args:
        dht: The DHT.
        key: See :func:`sharing_key`.
        priority: Returns the priority of the state, or None while it is not shared.
        changed: Set when the priority may have changed.
        period: Longest time between two announcements [s].
    """
    shared = priority() is not None
    while True:
        changed.clear()
        expiration = get_dht_time() + period
        value = priority()
        if value is not None or shared:  # once more when sharing ends, to retract the entry
            shared = value is not None
            with contextlib.suppress(Exception):
                await asyncio.wait_for(
                    dht.store(
                        key,
                        subkey=dht.peer_id.to_bytes(),
                        value=value,
                        expiration_time=expiration,
                        return_future=True,
                    ),
                    period,
                )
        await asyncio.sleep(DECLARE_PAUSE_S)
        left = expiration - get_dht_time()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), max(0.0, left))


class SharedStates:
    """States that the other averagers of a prefix share, over the network.

    Args:
        dht: The DHT.
        key: See :func:`sharing_key`.
        stub_of: Returns the remote side of a peer.
        alive: Peers that are known to be alive.
        patience: Longest wait between two messages of a download [s].

    Attributes:
        received_bytes: Bytes received of states so far.
    """

    def __init__(
        self,
        dht: DHT,
        key: str,
        stub_of: Callable[[PeerID], Any],
        alive: Collection[PeerID],
        patience: float,
    ) -> None:
        self._dht, self._key, self._stub_of = dht, key, stub_of
        self._alive, self._patience = alive, patience
        self.received_bytes = 0

    async def peers(self) -> list[PeerID]:
        """Return the other peers that share their state, the one in the newest round first.

        Peers that are known to be alive come before the rest, as an entry outlives its peer.
        """
        asked = self._dht.get(self._key, latest=True, return_future=True)
        answer = await asyncio.wait_for(asked, ASK_S)
        entries = getattr(answer, "value", None)
        found = {
            PeerID(peer): (float(entry.value), random.random())
            for peer, entry in (entries.items() if isinstance(entries, dict) else ())
            if isinstance(entry, ValueWithExpiration) and isinstance(entry.value, (int, float))
        }
        found.pop(self._dht.peer_id, None)
        return sorted(found, key=lambda peer: (peer in self._alive, *found[peer]), reverse=True)

    async def state(self, peer: PeerID) -> State | None:
        """Download the metadata and the tensors of a peer's state; None if it shares none."""
        metadata: dict[str, Any] = {}

        async def parts(messages: Any) -> AsyncIterator[Any]:
            async for message in messages:
                if message.metadata:
                    metadata.update(MSGPackSerializer.loads(message.metadata))
                self.received_bytes += message.ByteSize()
                if message.ByteSize():
                    yield [message.tensor_part]

        tensors = await deserialize_tensor_stream(parts(await self._messages(peer)))
        return (metadata, tensors) if metadata else None

    async def digest(self, peer: PeerID) -> Digest | None:
        """Return the digest of a peer's state; closes the stream before the tensors arrive."""
        try:
            async with aclosing(await self._messages(peer)) as messages:
                async for message in messages:
                    if message.metadata:
                        return digest_in(MSGPackSerializer.loads(message.metadata))
        except Exception as error:
            logger.debug(f"could not get the digest of {peer}: {error!r}")
        return None

    async def _messages(self, peer: PeerID) -> Any:
        stream = await self._stub_of(peer).rpc_download_state(averaging_pb2.DownloadRequest())
        return aiter_with_timeout(stream, self._patience)
