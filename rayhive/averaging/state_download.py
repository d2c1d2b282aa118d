"""Download of a state from the peers that share theirs, checked before it is taken over.

The peers are asked in turn, the one in the newest round first. Each sends a digest of its
parameters ahead of its state. The downloaded state must be finite, agree with its own digest, and
agree with the digests of one or two other peers. A refused state is reported with its source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from rayhive.averaging.outlier_filter import floats, norm_of
from rayhive.averaging.state_digest import Digest, digest_in

logger = get_logger(__name__)

#: Largest relative distance between a state and its own digest: codecs may be lossy.
SAME = 0.1
#: Largest relative distance between the states of two peers of one run.
ALIKE = 0.5
#: Number of other peers whose digests a state is compared with.
OPINIONS = 2

State = tuple[dict[str, Any], list[torch.Tensor]]


class StateSources(Protocol):
    """Access to the states that other peers share.

    Attributes:
        received_bytes: Bytes received of states so far.
    """

    received_bytes: int

    async def peers(self) -> list[PeerID]:
        """Return the peers that share their state, in the order in which to ask them."""

    async def state(self, peer: PeerID) -> State | None:
        """Return the metadata and the tensors of a peer's state; None if it has none."""

    async def digest(self, peer: PeerID) -> Digest | None:
        """Return the digest of a peer's state without downloading it; None if there is none."""


@dataclass(frozen=True)
class DownloadOutcome:
    """Outcome of a download.

    Attributes:
        state: Metadata and tensors of the first sound state; None without one.
        refused: Refused states: ``offender``, ``reason`` (``not_finite``, ``checksum``,
            ``disagrees``), ``norm`` and ``bound``.
        received_bytes: Bytes received of states, refused ones included.
    """

    state: State | None
    refused: list[dict[str, Any]]
    received_bytes: int


class StateDownload:
    """One search for a sound state.

    Args:
        sources: The other peers' states.
        own: Averaged tensors of this peer. A joining peer still has those of the run's beginning.
    """

    def __init__(self, sources: StateSources, own: Sequence[torch.Tensor]) -> None:
        self._sources, self._own = sources, own
        self._state: State | None = None
        self._refused: list[dict[str, Any]] = []

    def outcome(self) -> DownloadOutcome:
        """Return the outcome so far."""
        return DownloadOutcome(self._state, self._refused, self._sources.received_bytes)

    async def run(self) -> None:
        """Ask the peers in turn until one has a sound state."""
        try:
            peers = await self._sources.peers()
            for peer in peers:
                if await self._ask(peer, [other for other in peers if other != peer]):
                    return
        except Exception as error:
            logger.warning(f"could not load a state: {error!r}")

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
            self._state = state
            return True
        logger.warning(f"the state of {peer} is refused: {reason}")
        norm = norm_of(floats(state[1]))
        record = {"offender": str(peer), "reason": reason, "norm": norm, "bound": None}
        self._refused.append(record)
        return False

    async def fault_in(self, state: State, others: Sequence[PeerID]) -> str | None:
        """Return the reason to refuse a state, or None.

        Args:
            state: Metadata and tensors.
            others: Peers whose digests may be compared with the state.
        """
        metadata, tensors = state
        if not math.isfinite(norm_of(floats(tensors))):
            return "not_finite"
        announced = digest_in(metadata)
        if announced is None:  # a state without parameters, in which peers may differ
            return None
        found = Digest.of(tensors[: announced.tensors])
        if found.distance(announced) > SAME:
            return "checksum"
        opinions: list[Digest] = []
        for other in others:
            opinion = await self._sources.digest(other)
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
        """Return whether a digest is nearer to this peer's own tensors than another one."""
        own = norm_of(floats(self._own[: found.tensors]))
        sizes = [abs(math.log((d.norm + 1e-12) / (own + 1e-12))) for d in (found, other)]
        return sizes[0] <= sizes[1]
