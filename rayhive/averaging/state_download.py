"""A state is taken over only if it is sound: finite, as its donor says it is, and like the others'.

Donors are asked in turn, the one in the newest round first. Each sends a digest of its parameters
ahead of the state. Whoever downloads compares what has arrived with it, and with the digests of
one or two other donors, which stop after that; a state that is refused names its donor.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import astuple, dataclass
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import deserialize_tensor_stream
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_logger
from hivemind.utils.asyncio import aiter_with_timeout

from rayhive.averaging.filtered_averager import floats
from rayhive.averaging.outlier_filter import norm_of
from rayhive.averaging.sketch import Sketcher

logger = get_logger(__name__)

#: Relative distance up to which a state counts as what its donor announced: codecs may be lossy.
SAME = 0.1
#: Relative distance up to which the states of two donors count as of one run.
ALIKE = 0.5
#: Other donors that are asked for their opinion.
OPINIONS = 2
#: Longest wait for a list of donors [s].
ASK_S = 10.0


@dataclass(frozen=True)
class Digest:
    """What tells a state from another one, in a few numbers.

    Attributes:
        tensors: The first so many tensors of the state are what it is of.
        norm: Their Euclidean norm.
        sketch: Their sketch, float32.
    """

    tensors: int
    norm: float
    sketch: bytes

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Digest:
        """Return the digest of tensors."""
        found = floats(tensors)
        sketch = Sketcher([tensor.numel() for tensor in found])(found)
        return cls(len(tensors), norm_of(found), sketch.numpy().tobytes())

    def distance(self, other: Digest) -> float:
        """Return ``|a - b| / max(|a|, |b|)``, estimated."""
        ours, theirs = (
            torch.frombuffer(bytearray(digest.sketch), dtype=torch.float32)
            for digest in (self, other)
        )
        scale = max(self.norm, other.norm)
        if self.tensors != other.tensors or not math.isfinite(scale):
            return math.inf
        return float((ours - theirs).norm()) / scale if scale else 0.0


State = tuple[dict[str, Any], list[torch.Tensor]]


class CheckedStateDownload(DecentralizedAverager):
    """Takes over sound states only; stands after the averager that it serves among the bases.

    Attributes:
        refused_states: What was refused since the list was last emptied: ``offender``,
            ``reason`` (``not_finite``, ``checksum``, ``disagrees``) and ``norm``.
        downloaded_bytes: What was received of states so far, refused ones included [B].
    """

    refused_states: list[dict[str, Any]]
    downloaded_bytes: int = 0
    _received: int = 0  # the same, in the averager's process

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Return the metadata and the tensors of the first sound state; None without one.

        Raises:
            ValueError: Asked not to wait.
            TimeoutError: It took too long.
        """
        if not wait:
            raise ValueError("a state that is checked has to be waited for")
        future: MPFuture[Any] = MPFuture()
        request = {"future": future, "timeout": timeout}
        self._outer_pipe.send(("_load_state_from_peers", [], request))
        state, refused, received = future.result(timeout)
        self.downloaded_bytes += received
        self.refused_states = [*getattr(self, "refused_states", ()), *refused]
        return state

    async def _load_state_from_peers(self, future: MPFuture, timeout: float | None = None) -> None:
        patience = self.request_timeout if timeout is None else self._between_messages(timeout)
        refused: list[dict[str, Any]] = []
        state: State | None = None
        before = self._received
        try:
            donors = await self._donors()
            for donor in donors:
                state = await self._sound_state(donor, donors, patience, refused)
                if state is not None:
                    break
        except Exception as error:
            logger.warning(f"could not load a state: {error!r}")
        finally:
            if not future.done():
                future.set_result((state, refused, self._received - before))

    def _between_messages(self, timeout: float) -> float:
        return min(timeout, float(self.next_chunk_timeout or self.request_timeout))

    async def _donors(self) -> list[PeerID]:
        """Return the other peers that share their state, the one in the newest round first.

        Those that are known to be alive come before the others: an entry outlives its peer.
        """
        key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
        asked = self.dht.get(key, latest=True, return_future=True)
        answer = await asyncio.wait_for(asked, ASK_S)
        entries = getattr(answer, "value", None)
        found = {
            PeerID(peer): (float(entry.value), random.random())
            for peer, entry in (entries.items() if isinstance(entries, dict) else ())
            if isinstance(entry, ValueWithExpiration) and isinstance(entry.value, (int, float))
        }
        found.pop(self.peer_id, None)
        alive = self._matchmaking.group_formation.known()
        return sorted(found, key=lambda peer: (peer in alive, *found[peer]), reverse=True)

    async def _sound_state(
        self,
        donor: PeerID,
        donors: list[PeerID],
        patience: float,
        refused: list[dict[str, Any]],
    ) -> State | None:
        try:
            state = await self._download(donor, patience)
        except Exception as error:
            logger.warning(f"could not download the state of {donor}: {error!r}")
            return None
        if state is None:
            return None
        others = [peer for peer in donors if peer != donor]
        reason = await self._fault_in(state, others, patience)
        if reason is None:
            return state
        logger.warning(f"the state of {donor} is refused: {reason}")
        norm = norm_of(floats(state[1]))
        refused.append({"offender": str(donor), "reason": reason, "norm": norm, "bound": None})
        return None

    async def _download(self, donor: PeerID, patience: float) -> State | None:
        metadata: dict[str, Any] = {}

        async def parts(messages: Any) -> AsyncIterator[Any]:
            async for message in messages:
                if message.metadata:
                    metadata.update(self.serializer.loads(message.metadata))
                self._received += message.ByteSize()
                if message.ByteSize():
                    yield [message.tensor_part]

        tensors = await deserialize_tensor_stream(parts(await self._state_of(donor, patience)))
        return (metadata, tensors) if metadata else None

    async def _state_of(self, donor: PeerID, patience: float) -> Any:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        return aiter_with_timeout(stream, patience)

    async def _opinion(self, donor: PeerID, patience: float) -> Digest | None:
        """Return what another donor has, and hang up before it sends it."""
        try:
            async with aclosing(await self._state_of(donor, patience)) as messages:
                async for message in messages:
                    if message.metadata:
                        return _digest_in(self.serializer.loads(message.metadata))
        except Exception as error:
            logger.debug(f"{donor} has no opinion: {error!r}")
        return None

    async def _fault_in(self, state: State, others: list[PeerID], patience: float) -> str | None:
        """Return why a state cannot be right, or None."""
        metadata, tensors = state
        if not math.isfinite(norm_of(floats(tensors))):
            return "not_finite"
        said = _digest_in(metadata)
        if said is None:  # it tells its round alone: a state that others need not share
            return None
        found = Digest.of(tensors[: said.tensors])
        if found.distance(said) > SAME:
            return "checksum"
        opinions: list[Digest] = []
        for other in others:
            opinion = await self._opinion(other, patience)
            if opinion is not None:
                opinions.append(opinion)
            if len(opinions) == OPINIONS:
                break
        if not opinions or any(found.distance(opinion) <= ALIKE for opinion in opinions):
            return None
        if len(opinions) == 1 and self._is_nearer(found, opinions[0]):
            return None
        return "disagrees"

    def _is_nearer(self, found: Digest, other: Digest) -> bool:
        """Say which of two is more like what this peer has itself, which is the run's beginning."""
        own = norm_of(floats(self._averaged_tensors[: found.tensors]))
        sizes = [abs(math.log((d.norm + 1e-12) / (own + 1e-12))) for d in (found, other)]
        return sizes[0] <= sizes[1]


def _digest_in(metadata: dict[str, Any]) -> Digest | None:
    told = metadata.get("digest")
    return None if told is None else Digest(*told)


def with_digest(metadata: dict[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the metadata of a state with the digest of its tensors."""
    return {**metadata, "digest": list(astuple(Digest.of(tensors)))}
