"""States for joining peers: announcement in the DHT, download, and checks before the takeover.

The peers are asked in turn, the one in the newest round first. Each sends a digest of its
parameters ahead of its state. The downloaded state must be finite, agree with its own digest, and
agree with the digests of one or two other peers. A refused state is reported with its source.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Sequence,
)
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from hivemind.compression import deserialize_tensor_stream
from hivemind.dht import DHT
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, get_dht_time, get_logger
from hivemind.utils.asyncio import aiter_with_timeout

from rayhive.averaging.round_filter import are_finite
from rayhive.averaging.tensor_summary import Digest, digest_in, floats, norm_of

logger = get_logger(__name__)

#: Longest wait for the list of peers that share their state [s].
ASK_S = 10.0
#: Shortest time between two announcements of this peer's state [s], and of two rounds of it. An
#: announcement calls several peers of the DHT.
DECLARE_PAUSE_S, ROUND_PAUSE_S = 1.0, 5.0
#: Announcements of an unchanged state in the time for which one is valid.
ANNOUNCEMENTS = 3
#: Interval at which a peer looks whether its state is that of a newer round [s].
LOOK_S = 1.0
#: Largest relative distance between a state and its own digest: codecs may be lossy.
SAME = 0.1
#: Largest relative distance between the states of two peers of one run.
ALIKE = 0.5
#: Number of other peers whose digests a state is compared with.
OPINIONS = 2

State = tuple[dict[str, Any], list[torch.Tensor]]


async def declare_state(
    dht: DHT, key: str, priority: Callable[[], float | None], changed: asyncio.Event, period: float
) -> None:
    """Announce this peer's state in the DHT, on each change and before it expires, for ever.

    hivemind announces after every averaged tensor, several times a round. Here announcements are at
    least :data:`DECLARE_PAUSE_S` apart, and :data:`ROUND_PAUSE_S` where both are of trained states:
    a joiner that finds no trained state begins with its own parameters. For the same reason an
    unchanged state is announced several times while one announcement is valid, and one that failed
    is repeated.

    Args:
        dht: The DHT.
        key: Key of the run's states.
        priority: Returns the priority of the state, or None while it is not shared.
        changed: Set when sharing, or the training of the state, begins or ends.
        period: Time for which an announcement is valid [s].
    """
    shared = priority() is not None
    while True:
        changed.clear()
        begun = get_dht_time()
        renewal = begun + period / ANNOUNCEMENTS
        value = priority()
        if value is not None or shared:  # once more when sharing ends, to retract the entry
            shared = value is not None
            try:
                await asyncio.wait_for(
                    dht.store(
                        key,
                        subkey=dht.peer_id.to_bytes(),
                        value=value,
                        expiration_time=begun + period,
                        return_future=True,
                    ),
                    period,
                )
            except Exception as error:
                logger.debug(f"the state was not announced: {error!r}")
                renewal = begun
        await asyncio.sleep(DECLARE_PAUSE_S)
        next_round = get_dht_time() + ROUND_PAUSE_S - DECLARE_PAUSE_S
        while _is_trained(priority()) == _is_trained(value):
            left = (next_round if priority() != value else renewal) - get_dht_time()
            if left <= 0.0:
                break
            changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(left, LOOK_S))


def _is_trained(priority: float | None) -> bool | None:
    """Return whether a shared state is that of a round; None if none is shared."""
    return None if priority is None else priority > 0.0


@dataclass
class SharedStates:
    """States that the other averagers of a prefix share, over the network.

    Attributes:
        dht: The DHT.
        key: Key of the run's states.
        stub_of: Returns the remote side of a peer.
        alive: Peers that are known to be alive.
        patience: Longest wait between two messages of a download [s].
        received_bytes: Bytes received of states so far.
    """

    dht: DHT
    key: str
    stub_of: Callable[[PeerID], Any]
    alive: Collection[PeerID]
    patience: float
    received_bytes: int = 0

    async def peers(self) -> list[PeerID]:
        """Return the other peers that share their state, the one in the newest round first.

        Peers that are known to be alive come before the rest, as an entry outlives its peer.
        """
        asked = self.dht.get(self.key, latest=True, return_future=True)
        answer = await asyncio.wait_for(asked, ASK_S)
        entries = getattr(answer, "value", None)
        found = {
            PeerID(peer): (float(entry.value), random.random())
            for peer, entry in (entries.items() if isinstance(entries, dict) else ())
            if isinstance(entry, ValueWithExpiration) and isinstance(entry.value, (int, float))
        }
        found.pop(self.dht.peer_id, None)
        return sorted(found, key=lambda peer: (peer in self.alive, *found[peer]), reverse=True)

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

        async with aclosing(self._messages(peer)) as messages:
            tensors = await deserialize_tensor_stream(parts(messages))
        return (metadata, tensors) if metadata else None

    async def digest(self, peer: PeerID) -> Digest | None:
        """Return the digest of a peer's state; closes the stream before the tensors arrive."""
        try:
            async with aclosing(self._messages(peer)) as messages:
                async for message in messages:
                    if message.metadata:
                        return digest_in(MSGPackSerializer.loads(message.metadata))
        except Exception as error:
            logger.debug(f"could not get the digest of {peer}: {error!r}")
        return None

    async def _messages(self, peer: PeerID) -> AsyncGenerator[Any, None]:
        stream = await self.stub_of(peer).rpc_download_state(averaging_pb2.DownloadRequest())
        async with aclosing(stream):
            async for message in aiter_with_timeout(stream, self.patience):
                yield message


@dataclass
class DownloadOutcome:
    """Outcome of a download so far.

    Attributes:
        state: Metadata and tensors of the first sound state; None without one.
        refused: Refused states: ``offender``, ``reason`` (``not_finite``, ``checksum``,
            ``disagrees``), ``norm`` and ``bound``.
        received_bytes: Bytes received of states, refused ones included.
    """

    state: State | None = None
    refused: list[dict[str, Any]] = field(default_factory=list)
    received_bytes: int = 0


def patience_of(
    timeout: float | None, request_timeout: float, chunk_timeout: float | None
) -> float:
    """Return the longest wait for one message of a state [s].

    Args:
        timeout: Longest download [s]; None for any.
        request_timeout: Longest wait for an answer [s].
        chunk_timeout: Longest wait for a part of a long message [s]; None for the same.
    """
    return request_timeout if timeout is None else min(timeout, chunk_timeout or request_timeout)


class LatestDownload:
    """Runs downloads one at a time: a new one ends an earlier one, which was given up."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def run(self, download: Coroutine[Any, Any, None]) -> None:
        """Run a download to its end, or to the begin of the next one."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(download)
        await asyncio.wait({self._task})


@dataclass(frozen=True)
class OwnState:
    """Summary of a peer's own state, for comparison with another peer's.

    Attributes:
        norm: Norm of its parameters.
        masks: Tensors at the end of a state, counted from the last, which is 1, that need not be
            finite: in its own module they are not, such as masks of -inf.
    """

    norm: float = 0.0
    masks: frozenset[int] = frozenset()


class StateDownload:
    """One search for a sound state.

    Args:
        sources: The other peers' states.
        own: This peer's state. A joining peer still has that of the run's beginning.

    Attributes:
        outcome: The outcome so far.
    """

    def __init__(self, sources: SharedStates, own: OwnState) -> None:
        self._sources, self._own = sources, own
        self.outcome = DownloadOutcome()

    async def run(self) -> None:
        """Ask the peers in turn until one has a sound state."""
        try:
            peers = await self._sources.peers()
            for peer in peers:
                if await self._ask(peer, [other for other in peers if other != peer]):
                    return
        except Exception as error:
            logger.warning(f"could not load a state: {error!r}")
        finally:
            self.outcome.received_bytes = self._sources.received_bytes

    async def run_for(self, future: Future[DownloadOutcome]) -> None:
        """Run, and set a future to the outcome however the run ends."""
        try:
            await self.run()
        finally:
            if not future.done():
                future.set_result(self.outcome)

    async def _ask(self, peer: PeerID, others: Sequence[PeerID]) -> bool:
        """Download and check the state of one peer; return whether it is sound."""
        try:
            state = await self._sources.state(peer)
        except Exception as error:
            logger.warning(f"could not download the state of {peer}: {error!r}")
            return False
        if state is None:
            return False
        reason = await self.fault_in(state, others)
        if reason is None:
            self.outcome.state = state
            return True
        logger.warning(f"the state of {peer} is refused: {reason}")
        norm = norm_of(floats(state[1]))
        record = {"offender": str(peer), "reason": reason, "norm": norm, "bound": None}
        self.outcome.refused.append(record)
        return False

    async def fault_in(self, state: State, others: Sequence[PeerID]) -> str | None:
        """Return the reason to refuse a state, or None.

        Args:
            state: Metadata and tensors.
            others: Peers whose digests may be compared with the state.
        """
        metadata, tensors = state
        judged = [t for at, t in enumerate(tensors) if len(tensors) - at not in self._own.masks]
        if not are_finite(judged):
            return "not_finite"
        announced = digest_in(metadata)
        if announced is None:  # a state without parameters, in which peers may differ
            return None
        found = Digest.of(tensors[: announced.tensors])
        if found.distance(announced) > SAME:
            return "checksum"
        opinions = await self._opinions(others)
        if not opinions or any(found.distance(opinion) <= ALIKE for opinion in opinions):
            return None
        if len(opinions) == 1 and self._is_nearer(found, opinions[0]):
            return None
        return "disagrees"

    async def _opinions(self, others: Sequence[PeerID]) -> list[Digest]:
        """Return the digests of at most :data:`OPINIONS` other peers, which are asked together.

        Peers that are not known to be alive are asked only if no other one answers: each of them
        that is dead takes as long as an attempt to connect to it.
        """
        alive = [peer for peer in others if peer in self._sources.alive]
        opinions: list[Digest] = []
        for left in (alive, [peer for peer in others if peer not in alive]):
            while left and len(opinions) < OPINIONS:
                count = OPINIONS - len(opinions)
                asked, left = left[:count], left[count:]
                found = await asyncio.gather(*map(self._sources.digest, asked))
                opinions += [opinion for opinion in found if opinion is not None]
            if opinions:
                break
        return opinions

    def _is_nearer(self, found: Digest, other: Digest) -> bool:
        """Return whether a digest is nearer to this peer's own state than another one."""
        own = self._own.norm + 1e-12
        sizes = [abs(math.log((d.norm + 1e-12) / own)) for d in (found, other)]
        return sizes[0] <= sizes[1]
