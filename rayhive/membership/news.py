"""Change log of a membership view, and its replication to other peers.

The changes are numbered. A message holds the changes after the last number that the receiver has
acknowledged, so nothing is sent twice.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayhive.membership.view import Heartbeat


class NewsLog:
    """Numbers of the newest change of each peer.

    Attributes:
        log_id: Random id; positions of a peer's former incarnation must not count.
        position: Number of the newest change.
    """

    def __init__(self, log_id: int | None = None) -> None:
        self.log_id = random.getrandbits(62) if log_id is None else log_id
        self.position = 0
        self._changed: dict[bytes, int] = {}
        self._addressed: dict[bytes, tuple[int, tuple[str, ...]]] = {}

    def add(self, peer: bytes, addresses: tuple[str, ...]) -> None:
        """Note a change of a peer, and its present addresses."""
        self.position += 1
        self._changed.pop(peer, None)
        self._changed[peer] = self.position  # the newest one is last
        if self._addressed.get(peer, (0, None))[1] != addresses:
            self._addressed[peer] = (self.position, addresses)

    def since(self, position: int) -> list[bytes]:
        """Return the peers that have changed after a position, the latest change first."""
        newest = itertools.takewhile(
            lambda peer: self._changed[peer] > position, reversed(self._changed)
        )
        return list(newest)

    def knows_addresses(self, peer: bytes, position: int) -> bool:
        """Return whether a peer that has this log up to a position has another's addresses."""
        return peer in self._addressed and self._addressed[peer][0] <= position

    def keep(self, peers: frozenset[bytes]) -> None:
        """Drop all but some peers."""
        for peer in self._changed.keys() - peers:
            del self._changed[peer]
            self._addressed.pop(peer, None)


@dataclass(eq=False)
class Link:
    """Replication state between this peer and another one.

    Attributes:
        acknowledged: Position of the own log that the other peer has.
        sent: Position up to which news are on the way to it, or there.
        their_log: Id of its log.
        have: Position of its log that this peer has.
        has_version: Version of this peer's announcement that it has.
        known: Announcements for all peers that it is known to have: peer -> version.
        heard: Time of its last message [s].
    """

    acknowledged: int = 0
    sent: int = 0
    their_log: int = 0
    have: int = 0
    has_version: int = 0
    known: dict[bytes, int] = field(default_factory=dict)
    heard: float = -math.inf
    _waiting_since: float = 0.0
    _ahead: dict[int, int] = field(default_factory=dict)

    def take(self, log_id: int, start: int, end: int) -> None:
        """Note that a message brought the news of a log after ``start``, up to ``end``."""
        if log_id != self.their_log:  # a new incarnation has none of this peer's news
            self.their_log, self.have = log_id, 0
            self.acknowledged = self.sent = self.has_version = 0
            self.known.clear()
            self._ahead.clear()
        self._ahead[start] = max(end, self._ahead.get(start, 0))  # it may have overtaken another
        for first in sorted(self._ahead):
            if first <= self.have:
                self.have = max(self.have, self._ahead.pop(first))

    def acknowledge(self, position: int, version: int, now: float) -> None:
        """Note the position of the own log, and the version of the own announcement, it has."""
        if position > self.acknowledged:
            self.acknowledged, self._waiting_since = position, now
        self.sent = max(self.sent, position)
        self.has_version = max(self.has_version, version)

    def send(self, end: int, now: float, patience: float) -> int:
        """Note that a message takes along the news up to a position; return where they begin.

        Args:
            end: The position.
            now: The present time [s].
            patience: Time after which a message without an acknowledgement was lost [s].
        """
        if self.sent == self.acknowledged:
            self._waiting_since = now
        elif now - self._waiting_since > patience:
            self.missed()
        start, self.sent = self.sent, end
        return start

    def reset(self) -> None:
        """Note that the other peer may lack everything: it was apart from this one."""
        self.acknowledged = self.sent = self.has_version = 0
        self.known.clear()

    def missed(self) -> None:
        """Note that a message may not have arrived: its news are to be sent again."""
        self.sent = self.acknowledged

    def lacks(
        self, log: NewsLog, start: int, find: Callable[[bytes], Heartbeat | None]
    ) -> Iterator[bytes]:
        """Yield the peers of which it lacks the newest announcement for all peers.

        Args:
            log: The own log.
            start: Position after which news may be missing.
            find: Returns the newest known announcement of a peer.
        """
        for peer in log.since(start):
            heartbeat = find(peer)
            if heartbeat is not None and self.known.get(peer, -1) < heartbeat.spread:
                yield peer
