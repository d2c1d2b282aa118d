"""Membership view: one peer's picture of the swarm. No network, and the clock is passed in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Rounds that a peer may be behind and still be awaited: one behind by two finishes the round
#: before. A peer further behind has to download the state.
ROUNDS_BEHIND = 2


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
    """

    peer_id: bytes
    client_mode: bool
    round: int
    averaged: int
    met: int
    entered: int | None = None

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
        samples_per_second: Its recent speed.
        hurry: A round that it asks the other peers to begin at once.
        entered: The last round that it has begun to average; before that it computes.
        away: Whether it is only on a break: it validates, saves or loads data.
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
    samples_per_second: float = 0.0
    hurry: int = 0
    entered: int = 0
    away: bool = False
    addresses: tuple[str, ...] = ()

    def pack(self) -> list[Any]:
        """Return the fields as a list, for the wire."""
        return list(vars(self).values())

    @classmethod
    def unpack(cls, fields: Iterable[Any]) -> Heartbeat:
        """Return the announcement with the fields of :meth:`pack`.

        Raises:
            TypeError: There are too few or too many fields.
        """
        heartbeat = cls(*fields)
        return replace(heartbeat, addresses=tuple(heartbeat.addresses))


@dataclass(frozen=True)
class Reunion:
    """Return of peers that were lost without a goodbye.

    Attributes:
        since: The last round that this peer had finished when it lost the first of them.
        peers: Their ids.
    """

    since: int
    peers: frozenset[bytes]


@dataclass
class _Peer:
    """Another peer as a view knows it; times are of the view's clock [s].

    Attributes:
        heartbeat: Its newest announcement.
        received: Time of its last message.
        progressed: Time of its last progress.
        unreachable: Whether it was given up and not heard of since.
        lost_in: This peer's last finished round when it was lost; None if it was not.
    """

    heartbeat: Heartbeat
    received: float
    progressed: float
    unreachable: bool = False
    lost_in: int | None = None


class MembershipView:
    """The announcements that a peer has received, and when it received them.

    Threads that share a view hold its :attr:`lock`, which is re-entrant.

    Args:
        own: The peer's own state.
        silence: A peer without a message for so long counts as dead [s].
        clock: Monotonic time [s].
        straggler_timeout: Rounds stop waiting for a peer that computes without progress for so
            long, until it makes progress again [s].
    """

    def __init__(
        self,
        own: Heartbeat,
        silence: float,
        clock: Callable[[], float] = time.monotonic,
        straggler_timeout: float = math.inf,
    ) -> None:
        self.own, self.silence, self._clock = own, silence, clock
        self.straggler_timeout = straggler_timeout
        self.lock = threading.Condition()
        self._progressed = clock()
        self._others: dict[bytes, _Peer] = {}
        self._reunion: Reunion | None = None

    # -- this peer ---------------------------------------------------------------------------------

    def announce(self, **fields: Any) -> None:
        """Change this peer's own state."""
        self.own = replace(self.own, version=self.own.version + 1, **fields)
        self.note_progress()

    def note_progress(self) -> None:
        """Note that this peer makes progress now."""
        self._progressed = self._clock()

    # -- announcements -----------------------------------------------------------------------------

    def receive(self, heartbeat: Heartbeat, age: float = 0.0, idle: float = 0.0) -> bool:
        """Take in the announcement of a peer, received from it or through another peer.

        Args:
            heartbeat: The announcement.
            age: Its age [s]; 0 if it comes from the peer itself.
            idle: Time without progress of the peer [s].

        Returns:
            Whether it is newer than the known one.
        """
        if heartbeat.peer_id == self.own.peer_id:
            return False
        now, direct = self._clock(), age == 0.0
        peer = self._others.get(heartbeat.peer_id)
        if peer is None:
            self._others[heartbeat.peer_id] = _Peer(heartbeat, now - age, now - idle)
            return True
        peer.progressed = max(peer.progressed, now - idle)
        if direct:
            peer.unreachable = False
            self._note_return(peer)
        # A relayed announcement makes a peer known. It keeps a peer alive only in client mode,
        # where it cannot be called: reports of a dead peer could go round in circles.
        if direct or heartbeat.client_mode:
            peer.received = max(peer.received, now - age)
        if peer.heartbeat.version >= heartbeat.version:
            return False
        peer.heartbeat = heartbeat
        self._note_return(peer)  # also when relayed: all peers should note it at the same time
        return True

    def records(self) -> list[list[Any]]:
        """Return the records of all live peers, for the wire: fields, age and idle time [s]."""
        now = self._clock()
        alive = [peer for peer in self._others.values() if self._alive(peer)]
        others = (  # an age of 0 means direct
            [p.heartbeat.pack(), max(1e-6, now - p.received), now - p.progressed] for p in alive
        )
        return [self.own_record(), *others]

    def own_record(self) -> list[Any]:
        """Return the record of this peer: fields, age and idle time [s]."""
        return [self.own.pack(), 0.0, self._clock() - self._progressed]

    # -- losses and returns ------------------------------------------------------------------------

    def give_up(self, peer: bytes) -> None:
        """Count a peer that cannot be reached as dead until it is heard of again."""
        if peer in self._others:
            self._others[peer].unreachable = True
        self.note_losses()

    def note_losses(self) -> None:
        """Note the lost peers, and this peer's round at the time of the loss."""
        for peer in map(self._others.__getitem__, self.lost()):
            peer.lost_in = self.own.round if peer.lost_in is None else peer.lost_in

    def lost(self) -> frozenset[bytes]:
        """Return the ids of dead peers that did not announce that they leave."""
        return frozenset(
            peer_id
            for peer_id, peer in self._others.items()
            if peer.heartbeat.takes_part and not self._alive(peer)
        )

    def _note_return(self, peer: _Peer) -> None:
        since, peer.lost_in = peer.lost_in, None
        if since is not None:
            before = self._reunion or Reunion(since, frozenset())
            peers = before.peers | {peer.heartbeat.peer_id}
            self._reunion = Reunion(min(before.since, since), peers)

    def take_reunion(self) -> Reunion | None:
        """Return the lost peers that came back since the last call; None if there are none."""
        reunion, self._reunion = self._reunion, None
        return reunion

    def skip(self, rounds: int) -> None:
        """Date losses later by rounds that this peer jumps over and so does not commit."""
        for peer in self._others.values():
            peer.lost_in = None if peer.lost_in is None else peer.lost_in + rounds
        if self._reunion is not None:
            self._reunion = Reunion(self._reunion.since + rounds, self._reunion.peers)

    def forget(self, seconds: float) -> None:
        """Drop peers without a message for so long [s]."""
        oldest = self._clock() - seconds
        self._others = {id_: peer for id_, peer in self._others.items() if peer.received >= oldest}

    # -- peers -------------------------------------------------------------------------------------

    def known(self) -> list[Heartbeat]:
        """Return all other known peers, dead ones included."""
        return [peer.heartbeat for peer in self._others.values()]

    def knows(self, peer: bytes) -> bool:
        """Return whether another peer is known, dead or alive."""
        return peer in self._others

    def addresses_of(self, peer: bytes) -> tuple[str, ...]:
        """Return the announced addresses of a peer."""
        known = self._others.get(peer)
        return () if known is None else known.heartbeat.addresses

    def is_alive(self, peer: bytes) -> bool:
        """Return whether another peer is known and alive."""
        return peer in self._others and self._alive(self._others[peer])

    def _alive(self, peer: _Peer) -> bool:
        return not peer.unreachable and self._clock() - peer.received <= self.silence

    def alive(self) -> list[Heartbeat]:
        """Return all live peers, this one included, the oldest first."""
        if not self._others:
            return [self.own]
        others = [peer.heartbeat for peer in self._others.values() if self._alive(peer)]
        return sorted([self.own, *others], key=lambda p: (p.since, p.peer_id))

    def alive_ids(self) -> set[bytes]:
        """Return the ids of all live peers, this one included. It takes the lock by itself."""
        with self.lock:
            return {heartbeat.peer_id for heartbeat in self.alive()}

    def participants(self) -> list[Heartbeat]:
        """Return the live peers that take part, the oldest first, without stragglers."""
        alive = [heartbeat for heartbeat in self.alive() if heartbeat.takes_part]
        return [heartbeat for heartbeat in alive if not self.is_straggling(heartbeat)]

    def is_straggling(self, heartbeat: Heartbeat) -> bool:
        """Return whether another peer has computed for too long without progress.

        A peer that averages is none: it makes no progress either while it waits for other peers.
        """
        if heartbeat.peer_id == self.own.peer_id or heartbeat.entered > heartbeat.round:
            return False
        idle = self._clock() - self._others[heartbeat.peer_id].progressed
        return idle > self.straggler_timeout

    def members(self, kind: str, computes: bool = True) -> tuple[Member, ...]:
        """Return the peers that take part, for group formation.

        Args:
            kind: ``averaged`` for gradients, ``synchronised`` for parameters.
            computes: Whether peers come to this averaging from their batches, and not from
                another averaging.
        """
        return tuple(
            Member(
                p.peer_id, p.client_mode, p.round, getattr(p, kind), getattr(p, f"met_{kind}"),
                p.entered if computes else None,
            )
            for p in self.participants()
        )  # fmt: skip

    # -- progress ----------------------------------------------------------------------------------

    def newest_round(self) -> int:
        """Return the last round that a peer in the run, or on a break, has finished."""
        return max([self.own.round, *(p.round for p in self._company() if not p.client_mode)])

    def newest_averaged(self, kind: str) -> int:
        """Return the last round that another peer has averaged, or given up."""
        return max((getattr(p, kind) for p in self._company() if not p.client_mode), default=0)

    def _company(self) -> list[Heartbeat]:
        others = [p for p in self.alive() if p.peer_id != self.own.peer_id]
        return [p for p in others if p.takes_part or p.away]

    def samples(self) -> int:
        """Return the samples that are accumulated for the round after :meth:`newest_round`."""
        newest = self.newest_round()
        own = self.own.samples if self.own.round == newest else 0
        return own + sum(
            p.samples
            for p in self.participants()
            if p.round == newest and p.peer_id != self.own.peer_id
        )

    def is_in_a_hurry(self) -> bool:
        """Return whether a peer asks to begin the next round before it is full."""
        newest = self.newest_round()
        return any(p.hurry > newest for p in self.participants())

    def live_peers(self) -> int:
        """Return the number of peers, this one included, that can take part in the next round."""
        newest = self.newest_round()
        peers = [p for p in self.participants() if p.peer_id != self.own.peer_id]
        return 1 + sum(p.round >= newest - ROUNDS_BEHIND for p in peers)
