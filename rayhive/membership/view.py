"""Membership view: one peer's picture of the swarm. No network, and the clock is passed in."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import filterfalse
from typing import Any

from rayhive.membership.announcements import Heartbeat, Member, Reunion
from rayhive.membership.known_peer import KnownPeer

__all__ = ["ROUNDS_BEHIND", "Heartbeat", "Member", "MembershipView", "Reunion"]

#: Rounds that a peer may be behind and still be awaited: one behind by two finishes the round
#: before. A peer further behind has to download the state.
ROUNDS_BEHIND = 2


class MembershipView:
    """The announcements that a peer has received, and when it received them.

    Threads that share a view hold its :attr:`lock`, which is re-entrant.

    A watched peer exchanges messages with this peer directly, and its silence counts as a loss. The
    loss of any other peer is reported by its watchers.

    Args:
        own: The peer's own state.
        silence: A peer without a message for so long counts as dead [s].
        clock: Monotonic time [s].
        straggler_timeout: Rounds stop waiting for a peer that computes without progress for so
            long, until it makes progress again [s].

    Attributes:
        own: The peer's own state.
        loud: Its last announcement for all peers.
        sign_of: Returns the time of a peer's last sign of life besides its messages [s].
    """

    def __init__(
        self,
        own: Heartbeat,
        silence: float,
        clock: Callable[[], float] = time.monotonic,
        straggler_timeout: float = math.inf,
    ) -> None:
        self.own, self.silence, self._clock = own, silence, clock
        self.loud = own
        self.straggler_timeout = straggler_timeout
        self.lock = threading.Condition()
        self._progressed = clock()
        self._others: dict[bytes, KnownPeer] = {}
        self._watched: frozenset[bytes] | None = None
        self._stalled: frozenset[bytes] = frozenset()
        self._reunion: Reunion | None = None
        self.sign_of: Callable[[bytes], float] = lambda peer: -math.inf

    # -- this peer ---------------------------------------------------------------------------------

    def announce(self, aloud: bool = True, **fields: Any) -> None:
        """Change this peer's own state.

        Args:
            aloud: Whether all peers have to know of it soon.
            fields: Fields of :class:`Heartbeat`.
        """
        self.restate(aloud, **fields)
        self.note_progress()

    def restate(self, aloud: bool = True, **fields: Any) -> None:
        """Change this peer's own state, which is no progress."""
        version = self.own.version + 1
        spread = version if aloud else self.own.spread
        self.own = replace(self.own, version=version, spread=spread, **fields)
        if aloud:
            self.loud = self.own

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
            self._others[heartbeat.peer_id] = KnownPeer(heartbeat, now - age, now - idle, now)
            return True
        peer.progressed = max(peer.progressed, now - idle)
        # A relayed announcement makes a peer known. It keeps no watched peer alive: reports of a
        # dead peer could go round in circles. A peer in client mode cannot be called.
        counts = direct or heartbeat.client_mode or not self.watches(heartbeat.peer_id)
        if counts and (direct or now - age > peer.lost_at):
            if not self._alive(peer):
                peer.returned = now
            peer.unreachable = False
            peer.received = max(peer.received, now - age)
        if direct or (counts and self._alive(peer)):
            self._note_return(peer)
        if peer.heartbeat.version >= heartbeat.version:
            return False
        peer.take(heartbeat, now - age)
        self._note_return(peer)  # also when relayed: all peers should note it at the same time
        return True

    def record(self, peer: bytes) -> tuple[Heartbeat, float, float] | None:
        """Return the announcement of a live peer, its age and the peer's idle time [s]."""
        if peer == self.own.peer_id:
            return self.own, 0.0, self.idle()
        known = self._others.get(peer)
        if known is None or not self._alive(known):
            return None
        age = max(1e-6, self._clock() - known.received)  # an age of 0 means direct
        if not self.watches(peer):  # its watchers have reported no loss
            age = min(age, self.silence)
        return known.heartbeat, age, self._clock() - known.progressed

    def idle(self) -> float:
        """Return the time since this peer's last progress [s]."""
        return self._clock() - self._progressed

    # -- watched peers -----------------------------------------------------------------------------

    def watch(self, peers: Iterable[bytes] | None) -> None:
        """Set the watched peers; None for all, as at the beginning.

        A peer that is watched from now on has :attr:`silence` to send its first message.
        """
        self.note_losses()
        before = self._watched
        self._watched = None if peers is None else frozenset(peers)
        for peer_id, peer in self._others.items():
            if before is not None and peer_id not in before and self.watches(peer_id):
                peer.received = max(peer.received, self._clock())

    def watches(self, peer: bytes) -> bool:
        """Return whether a peer is watched."""
        return self._watched is None or peer in self._watched

    def report_stalled(self, peers: Iterable[bytes]) -> None:
        """Set the stragglers among the peers that are not watched."""
        self._stalled = frozenset(peers)

    def lost_at(self, peer: bytes) -> float:
        """Return the time at which a peer was given up; minus infinity if it was not."""
        known = self._others.get(peer)
        return -math.inf if known is None or not known.unreachable else known.lost_at

    def heard_of(self, peer: bytes) -> float:
        """Return the time at which a peer lived for certain; minus infinity if it is unknown."""
        known = self._others.get(peer)
        if known is None:
            return -math.inf
        self._is_silent(known)
        return known.received

    def back_since(self, peer: bytes) -> float:
        """Return the time at which a peer became known, or came back after a loss."""
        known = self._others.get(peer)
        return math.inf if known is None else known.returned

    # -- losses and returns ------------------------------------------------------------------------

    def give_up(self, peer: bytes) -> None:
        """Count a peer that cannot be reached as dead until it is heard of again."""
        if peer in self._others and not self._others[peer].unreachable:
            self._others[peer].unreachable = True
            self._others[peer].lost_at = self._clock()
        self.note_losses()

    def note_losses(self) -> None:
        """Note the silent and the lost peers, and this peer's round at the time of the loss."""
        for peer in self._others.values():
            if not peer.unreachable and not self._alive(peer):
                peer.unreachable, peer.lost_at = True, self._clock()
        for peer_id in filterfalse(self.is_present, self.lost()):
            peer = self._others[peer_id]
            peer.lost_in = self.own.round if peer.lost_in is None else peer.lost_in

    def lost(self) -> frozenset[bytes]:
        """Return the ids of dead peers that did not announce that they leave."""
        others = self._others.items()
        return frozenset(i for i, p in others if p.heartbeat.in_run and not self._alive(p))

    def _note_return(self, peer: KnownPeer) -> None:
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

    def forget(self, seconds: float) -> bool:
        """Drop dead peers without a message for so long [s], or that left; return if any were."""
        now, before = self._clock(), self._others
        kept = {i: p for i, p in before.items() if self._alive(p) or p.is_recent(now, seconds)}
        self._others = kept
        return len(kept) < len(before)

    # -- peers -------------------------------------------------------------------------------------

    def known(self) -> list[Heartbeat]:
        """Return all other known peers, dead ones included."""
        return [peer.heartbeat for peer in self._others.values()]

    def find(self, peer: bytes) -> Heartbeat | None:
        """Return the newest announcement of a peer; None if it is unknown."""
        if peer == self.own.peer_id:
            return self.own
        known = self._others.get(peer)
        return None if known is None else known.heartbeat

    def addresses_of(self, peer: bytes) -> tuple[str, ...]:
        """Return the announced addresses of a peer."""
        known = self._others.get(peer)
        return () if known is None else known.heartbeat.addresses

    def is_alive(self, peer: bytes) -> bool:
        """Return whether another peer is known and alive."""
        return peer in self._others and self._alive(self._others[peer])

    def _alive(self, peer: KnownPeer) -> bool:
        if peer.unreachable:
            return False
        return not self.watches(peer.heartbeat.peer_id) or not self._is_silent(peer)

    def is_present(self, peer: bytes) -> bool:
        """Return whether another peer is alive here, or others passed on news of it lately."""
        known, oldest = self._others.get(peer), self._clock() - self.silence
        return known is not None and (self._alive(known) or known.was_passed_on(oldest))

    def _is_silent(self, peer: KnownPeer) -> bool:
        """Return whether a peer has been silent for too long; look for a sign if it may have."""
        if not peer.unreachable and self._clock() - peer.received > self.silence / 4:
            peer.received = max(peer.received, self.sign_of(peer.heartbeat.peer_id))
        return self._clock() - peer.received > self.silence

    def alive(self) -> list[Heartbeat]:
        """Return all live peers, this one included, the oldest first."""
        if not self._others:
            return [self.own]
        others = [peer.heartbeat for peer in self._others.values() if self._alive(peer)]
        return sorted([self.own, *others], key=lambda p: (p.since, p.peer_id))

    def alive_ids(self) -> set[bytes]:
        """Return the ids of all live peers, this one included. It takes the lock by itself."""
        with self.lock:
            alive = {peer_id for peer_id, peer in self._others.items() if self._alive(peer)}
            return alive | {self.own.peer_id}

    def participants(self, alive: list[Heartbeat] | None = None) -> list[Heartbeat]:
        """Return the live peers that take part, the oldest first, without stragglers."""
        return [p for p in alive or self.alive() if p.takes_part and not self.is_straggling(p)]

    def is_straggling(self, heartbeat: Heartbeat) -> bool:
        """Return whether another peer has computed for too long without progress.

        A peer that averages is none: it makes no progress either while it waits for other peers.
        """
        if heartbeat.peer_id == self.own.peer_id or heartbeat.entered > heartbeat.round:
            return False
        if not self.watches(heartbeat.peer_id):
            return heartbeat.peer_id in self._stalled
        idle = self._clock() - self._others[heartbeat.peer_id].progressed
        return idle > self.straggler_timeout

    def members(
        self, kind: str, computes: bool = True, one_group: bool = True
    ) -> tuple[Member, ...]:
        """Return the peers that take part, for group formation.

        Args:
            kind: ``averaged`` for gradients, ``synchronised`` for parameters.
            computes: Whether peers come from their batches, and not from another averaging.
            one_group: Whether a round has one group: a peer that came too late skips it all.
        """
        after = self.own.in_round if one_group and not computes else 0
        return tuple(
            Member(
                p.peer_id, p.client_mode, self._reached(p),
                getattr(p, kind), getattr(p, f"met_{kind}"),
                p.entered if computes else None, self.is_left_out(p, after),
            )
            for p in self.participants()
        )  # fmt: skip

    # -- progress ----------------------------------------------------------------------------------

    def newest_round(self) -> int:
        """Return the last round that a peer in the run, or on a break, has finished."""
        return self._newest(self.alive())

    def _newest(self, alive: list[Heartbeat]) -> int:
        return max(self.own.round, max((p.round for p in self._company(alive)), default=0))

    def newest_averaged(self) -> int:
        """Return the last round whose gradients another peer has averaged, or given up."""
        return max((p.averaged for p in self.company()), default=0)

    def company(self) -> list[Heartbeat]:
        """Return the other live peers that take part in the run, or are on a break."""
        return self._company(self.alive())

    def _company(self, alive: list[Heartbeat]) -> list[Heartbeat]:
        own = self.own.peer_id
        return [p for p in alive if p.peer_id != own and p.in_run]

    def samples(self) -> int:
        """Return the samples for the round after :meth:`newest_round`, those of promises too."""
        return self._samples(self.alive())

    def _samples(self, alive: list[Heartbeat]) -> int:
        newest = self._newest(alive)
        own = self.own.samples if self.own.round == newest else 0
        others = (p for p in self.participants(alive) if p.peer_id != self.own.peer_id)
        return own + sum(p.counted_samples for p in others if p.round == newest)

    def is_round_due(self, target: int) -> bool:
        """Return whether this peer may begin its next round.

        It has kept its promise, and the samples are there or others have begun the round. Or the
        others have ended the round, or one of them is in a hurry.
        """
        alive = self.alive()  # once: this is asked several times in each batch
        newest, own = self._newest(alive), self.own
        due = own.samples >= own.promised
        if newest == own.round:
            due = due and self._samples(alive) >= target
        else:  # others may go on before the round has ended, and they wait for this peer
            due = due or self.newest_averaged() > own.round
        return due or any(p.hurry > own.round for p in self.participants(alive))

    def live_peers(self) -> int:
        """Return the number of peers, this one included, that can take part in the next round."""
        alive = self.alive()
        newest = self._newest(alive)
        peers = [p for p in self.participants(alive) if p.peer_id != self.own.peer_id]
        return 1 + sum(self._reached(p) >= newest - ROUNDS_BEHIND for p in peers)

    def note_group(self, round_: int, peers: Iterable[bytes], quorum: bool = False) -> None:
        """Note the peers of a group: they have finished the round before, announced or not.

        Args:
            round_: The round.
            peers: Ids of the peers.
            quorum: Whether the others were left out, and have to catch up.
        """
        group = frozenset(peers)
        for peer_id, peer in self._others.items():
            if peer_id in group:
                peer.met = max(peer.met, round_)
            elif quorum:
                peer.left_out = max(peer.left_out, round_)

    def note_unmet(self, round_: int) -> None:
        """Note that a round ended without a group: news of the peers that it awaited are due."""
        now = self._clock()
        for heartbeat in self.participants():
            peer = self._others.get(heartbeat.peer_id)
            if peer is not None and peer.reached(now) + ROUNDS_BEHIND >= round_:
                peer.unmet, peer.unmet_until = round_, now + self.silence

    def is_left_out(self, heartbeat: Heartbeat, after: int = 0) -> bool:
        """Return whether a quorum, or the round ``after``, began without a peer that is behind."""
        peer = self._others.get(heartbeat.peer_id)
        return peer is not None and (peer.is_left_out or not peer.has_begun(after))

    def _reached(self, heartbeat: Heartbeat) -> int:
        """Return the last round that a peer has finished, as far as this one knows."""
        peer = self._others.get(heartbeat.peer_id)
        return heartbeat.round if peer is None else peer.reached(self._clock())
