"""Comparison of replicas: whether the peers of a group hold the same parameters.

Complete rounds of gradients leave replicas equal to the bit (:mod:`rayhive.averaging.answers`), so
parameters need no averaging as long as nothing goes wrong. With every round of gradients each peer
announces an exact fingerprint of its parameters. Peers of a group read the same announcements, and
therefore decide the same. Optimizer statistics are not read: where they differ, the parameters
differ one round later.

Unequal hardware rounds differently. After a difference, peers announce digests, too, for some
rounds, and average their parameters only where the digests are farther apart than rounding
explains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from typing import Any

from rayhive.averaging.fingerprint import fingerprint
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.tensor_summary import BUCKETS, Digest
from rayhive.events import AveragingReason
from rayhive.optim.peer_state import PeerState

#: Relative distance up to which unequal hardware may let replicas drift apart.
DRIFT = 1e-6
#: The same where a codec of the parameters leaves a difference after each averaging.
LOSSY_DRIFT = 1e-3
#: Rounds after a difference in which digests are announced.
WATCHED_ROUNDS = 3
#: Reasons for which a peer asks its group to average parameters. If peers of a group have several
#: ones, the first in this list is reported.
ASKED: tuple[AveragingReason, ...] = ("partition", "failed_round", "joined")


@dataclass(frozen=True)
class Announcement:
    """Announcement of a peer to its group before a round of gradients.

    Attributes:
        round: The round, which the members of a group have in common.
        reason: Reason for which it asks the group to average parameters; None if it does not.
        exact: Fingerprint of its parameters; None while background work may change them.
        digest: Their digest; None if it is not needed.
    """

    round: int = 0
    reason: AveragingReason | None = None
    exact: bytes | None = None
    digest: Digest | None = None

    def packed(self) -> list[Any]:
        """Return the announcement as plain data."""
        digest = None if self.digest is None else list(astuple(self.digest))
        return [self.round, self.reason, self.exact, digest]

    @classmethod
    def read(cls, packed: Any) -> Announcement:
        """Return the announcement in plain data of another peer; parts without sense are None."""
        if not isinstance(packed, Sequence) or len(packed) != 4:
            return cls()
        round_, reason, exact, digest = packed
        return cls(
            round=round_ if isinstance(round_, int) else 0,
            reason=reason if reason in ASKED else None,
            exact=exact if isinstance(exact, bytes) else None,
            digest=_digest(digest),
        )


def _digest(found: Any) -> Digest | None:
    if not isinstance(found, Sequence) or len(found) != 3:
        return None
    tensors, norm, sketch = found
    sound = isinstance(tensors, int) and isinstance(norm, float) and isinstance(sketch, bytes)
    return Digest(tensors, norm, sketch) if sound and len(sketch) == 4 * BUCKETS else None


def asked_reason(announcements: Iterable[Announcement]) -> AveragingReason | None:
    """Return the reason for which peers ask to average parameters; None if no peer asks."""
    asked = {each.reason for each in announcements}
    return next((reason for reason in ASKED if reason in asked), None)


class ReplicaCheck:
    """Summarises a peer's replica, and compares the announcements of a group.

    Args:
        averager: Owner of the replica.
    """

    def __init__(self, averager: RayhiveStateAverager) -> None:
        self._averager, self._tolerance = averager, LOSSY_DRIFT if averager.lossy else DRIFT
        self._differed_in = -WATCHED_ROUNDS

    @classmethod
    def of(cls, peer: PeerState, period: int | None) -> ReplicaCheck | None:
        """Return the check of a peer; None if its replica may differ from those of its groups.

        Args:
            peer: The peer.
            period: Rounds between two averagings of parameters; None averages for a reason only.
        """
        return cls(peer.state_averager) if period is None and not peer.pairs else None

    def summary(self, round_: int) -> tuple[bytes | None, Digest | None]:
        """Return fingerprint and digest of the replica, each None where it cannot or need not be.

        Args:
            round_: The round of gradients that begins.
        """
        parameters = self._averager.settled_parameters()
        if parameters is None:
            return None, None
        watched = round_ <= self._differed_in + WATCHED_ROUNDS
        return fingerprint(parameters), Digest.of(parameters) if watched else None

    def differ(self, round_: int, announcements: Iterable[Announcement]) -> bool:
        """Return whether the replicas of a group are farther apart than the tolerance.

        Args:
            round_: The round of gradients that has ended.
            announcements: One of each peer of the group.
        """
        known = [each for each in announcements if each.exact is not None]
        if len({each.exact for each in known}) <= 1:
            return False
        self._differed_in = round_
        digests = [each.digest for each in known if each.digest is not None]
        if len(digests) < len(known):
            return True
        return any(a.distance(b) > self._tolerance for a, b in combinations(digests, 2))
