"""Announcements of peers, and what group formation and partitions need to know of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Member(NamedTuple):
    """A live peer that takes part in the run.

    Attributes:
        peer_id: Its id.
        client_mode: Whether it cannot be called, and so cannot lead a group.
        round: The last round that it has finished.
        averaged: The last round whose averaging it has finished or given up.
        met: The last round that it has averaged in a group.
        entered: The last round that it has begun to average; before that it computes. None if it
            comes to this averaging from another one, and so at once.
        left_out: Whether a round began without it, and it has not caught up since.
    """

    peer_id: bytes
    client_mode: bool
    round: int
    averaged: int
    met: int
    entered: int | None = None
    left_out: bool = False

    def computes(self, round_: int) -> bool:
        """Return whether the peer still computes its part of a round."""
        return self.entered is not None and self.entered < round_


@dataclass(frozen=True)
class Heartbeat:
    """State that a peer announces.

    Attributes:
        peer_id: Its id.
        since: When it joined [s on the DHT's clock]; the oldest peer leads groups.
        version: Number of the announcement; the largest number is the newest.
        takes_part: Whether rounds wait for the peer: not while it starts, loads or leaves.
        client_mode: Whether it cannot be called.
        round: The last round that it has finished.
        averaged: The last round whose gradients it has averaged, or given up.
        synchronised: The last round whose parameters it has averaged, or did not have to.
        met_averaged: The last round whose gradients it has averaged in a group.
        met_synchronised: The last round whose parameters it has averaged in a group.
        samples: Accumulated samples for the next round.
        promised: Samples that it promises to have before the next round; 0 without a promise.
        samples_per_second: Its recent speed.
        hurry: A round that it asks the other peers to begin at once.
        entered: The last round that it has begun to average; before that it computes.
        away: Whether it is only on a break: it validates, saves or loads data.
        untrained: Whether it joined a run and has not loaded its state yet.
        spread: Version of its last announcement for all peers; later changes go out with the
            heartbeats to its neighbours.
        unreachable: Ids of lost peers among those that it watches.
        stalled: Ids of stragglers among those that it watches.
        addresses: Multiaddresses at which it can be reached.
    """

    peer_id: bytes
    since: float
    version: int = 0
    takes_part: bool = False
    client_mode: bool = False
    round: int = 0
    averaged: int = 0
    synchronised: int = 0
    met_averaged: int = 0
    met_synchronised: int = 0
    samples: int = 0
    promised: int = 0
    samples_per_second: float = 0.0
    hurry: int = 0
    entered: int = 0
    away: bool = False
    untrained: bool = False
    spread: int = 0
    unreachable: tuple[bytes, ...] = ()
    stalled: tuple[bytes, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def in_round(self) -> int:
        """The round that it is in, if it has averaged the gradients in a group; else 0."""
        return self.met_averaged if self.synchronised < self.met_averaged else 0

    @property
    def in_run(self) -> bool:
        """Whether it takes part in the run, or is on a break."""
        return self.takes_part or self.away

    @property
    def counted_samples(self) -> int:
        """Samples of the peer that others count for the next round."""
        return max(self.samples, self.promised)

    def pack(self) -> list[Any]:
        """Return the fields as a list, for the wire."""
        return list(vars(self).values())

    @classmethod
    def unpack(cls, fields: Iterable[Any]) -> Heartbeat:
        """Return the announcement with the fields of :meth:`pack`.

        Raises:
            TypeError: There are too few or too many fields.
        """
        values = list(fields)
        values[-3:] = map(tuple, values[-3:])
        return cls(*values)


@dataclass(frozen=True)
class Reunion:
    """Return of peers that were lost without a goodbye.

    Attributes:
        since: The last round that this peer had finished when it lost the first of them.
        peers: Their ids.
    """

    since: int
    peers: frozenset[bytes]
