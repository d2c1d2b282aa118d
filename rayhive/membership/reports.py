"""Reports of watchers about other peers: which they cannot reach, and which make no progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rayhive.membership.topology import Topology
from rayhive.membership.view import Heartbeat, MembershipView

#: Watchers that are enough to give a peer up if it does not object, and the time that it has for
#: that, in heartbeats.
ENOUGH, OBJECTION = 3, 0.75
#: How long a loss is reported, and the interval of repetitions, in heartbeats.
REPORT, REPEAT = 10.0, 2.0


@dataclass(frozen=True)
class _Statement:
    """Report of one peer about others, and its time [s]."""

    unreachable: frozenset[bytes]
    stalled: frozenset[bytes]
    at: float


@dataclass(eq=False)
class Reports:
    """Reports of the other peers, and this peer's own.

    Attributes:
        view: The peer's membership view.
        clock: Monotonic time [s]; that of the view.
        heartbeat: Interval between two heartbeats [s].
    """

    view: MembershipView
    clock: Callable[[], float]
    heartbeat: float
    _statements: dict[bytes, _Statement] = field(default_factory=dict)
    _suspected: dict[bytes, float] = field(default_factory=dict)
    _disputed: dict[bytes, float] = field(default_factory=dict)
    _doubted: dict[bytes, float] = field(default_factory=dict)
    _claimed: dict[bytes, float] = field(default_factory=dict)
    _quiet_since: float | None = None
    _deaf_until: float = -math.inf

    # -- of other peers ----------------------------------------------------------------------------

    def note(self, heartbeat: Heartbeat, at: float) -> None:
        """Take in the report in an announcement.

        Args:
            heartbeat: Its newest announcement.
            at: Time of that [s].
        """
        unreachable, stalled = frozenset(heartbeat.unreachable), frozenset(heartbeat.stalled)
        if unreachable or stalled:
            self._statements[heartbeat.peer_id] = _Statement(unreachable, stalled, at)
        elif self._statements.pop(heartbeat.peer_id, None) is None:
            return
        stragglers = [
            peer
            for accuser, statement in self._statements.items()
            if self.view.is_alive(accuser)
            for peer in statement.stalled
        ]
        self.view.report_stalled(stragglers)

    def _accusers(self) -> dict[bytes, int]:
        """Return the number of watchers that cannot reach a peer and are no older than its news."""
        found: dict[bytes, int] = {}
        for accuser, statement in self._statements.items():
            # a report from before its reporter returned is about another part of the swarm
            if not self.view.is_alive(accuser) or statement.at < self.view.back_since(accuser):
                continue
            for peer in statement.unreachable:
                if statement.at > self.view.heard_of(peer):
                    found[peer] = found.get(peer, 0) + 1
        return found

    def verdicts(self, topology: Topology) -> list[bytes]:
        """Return the unwatched peers that enough of their watchers cannot reach."""
        if not self._statements:
            self._suspected.clear()
            self._doubted.clear()
            return []
        now, found, suspected, doubted = self.clock(), [], {}, {}
        for peer, accusers in self._accusers().items():
            if self.view.watches(peer) or not self.view.is_alive(peer):
                continue
            doubted[peer] = self._doubted.get(peer, now)
            known = self.view.find(peer)
            watchers = len(topology.watchers(peer, known is not None and known.client_mode))
            if accusers >= min(ENOUGH, max(1, watchers)):
                since = suspected[peer] = self._suspected.get(peer, now)
                if accusers > watchers / 2 or now - since >= OBJECTION * self.heartbeat:
                    found.append(peer)
        self._suspected, self._doubted = suspected, doubted
        return found

    def claim(self, peer: bytes) -> None:
        """Note that another peer takes an unwatched dead one for alive."""
        self._claimed.setdefault(peer, self.clock())

    def doubted(self) -> list[bytes]:
        """Return the unwatched peers of which it has been unclear for a while whether they live.

        Too few watchers have reported a live one as lost, for the rest may be lost, too; or a dead
        one is alive for another peer.
        """
        now, pause = self.clock(), self.view.silence
        found = [peer for peer, since in self._doubted.items() if now - since >= pause]
        self._doubted.update(dict.fromkeys(found, now))
        wait = REPEAT * self.heartbeat
        claimed = [peer for peer, since in self._claimed.items() if now - since >= wait]
        for peer in claimed:
            del self._claimed[peer]
        return found + [peer for peer in claimed if not self.view.is_alive(peer)]

    def next_verdict(self) -> float:
        """Return the time at which a suspected peer has had its time to object [s]."""
        times = (since + OBJECTION * self.heartbeat for since in self._suspected.values())
        return min(times, default=math.inf)

    def suspects(self) -> list[bytes]:
        """Return the watched live peers that another watcher cannot reach."""
        if not self._statements:
            return []
        return [p for p in self._accusers() if self.view.watches(p) and self.view.is_alive(p)]

    def objects(self, spoke: float) -> bool:
        """Return whether another peer cannot reach this one, and this one has to say that it lives.

        Args:
            spoke: Time of this peer's last announcement for all [s].
        """
        own = self.view.own.peer_id
        return any(
            own in statement.unreachable and statement.at > spoke and self.view.is_alive(accuser)
            for accuser, statement in self._statements.items()
        )

    # -- of this peer ------------------------------------------------------------------------------

    def was_asleep(self) -> None:
        """Note that this peer could not receive messages: it accuses no other peer for a while."""
        self._deaf_until = self.clock() + self.view.silence

    def dispute(self, peer: bytes, news: bool) -> bool:
        """Note that another peer takes a watched dead one for alive; return whether it may be back.

        Its loss is not reported while its own message may still be under way. After that it is
        reported again: the other peer has missed the loss.

        Args:
            peer: Id of the dead peer.
            news: Whether the other peer has a newer announcement of it.
        """
        lost_for = self.clock() - self.view.lost_at(peer)
        if peer in self._disputed or lost_for <= self.heartbeat * (1.0 if news else REPORT / 2):
            return False
        self._disputed[peer] = self.clock()
        return True

    def update(self, topology: Topology, spoke: float) -> bool:
        """Announce the present losses among the watched peers; return whether there is news.

        Args:
            topology: The present neighbours.
            spoke: Time of this peer's last announcement for all [s].
        """
        now, own = self.clock(), self.view.own
        if now < self._deaf_until:
            return False
        known = [each for each in self.view.known() if self.view.watches(each.peer_id)]
        if topology.small:  # all servers watch each other; a client does not watch other clients
            known = [each for each in known if each.client_mode]
        # a peer that is not watched any more, because it was lost, is still reported
        watched = {each.peer_id for each in known} | set(own.unreachable)
        lost_after = now - REPORT * self.heartbeat
        self._disputed = {
            peer: at
            for peer, at in self._disputed.items()
            if at >= lost_after and not self.view.is_alive(peer)
        }
        recent = {peer for peer in watched if self.view.lost_at(peer) >= lost_after}
        maybe_back = {p for p, at in self._disputed.items() if now - at < self.view.silence}
        unreachable = tuple(sorted((recent | self._disputed.keys() & watched) - maybe_back))
        alive = (each for each in known if self.view.is_alive(each.peer_id))
        stalled = tuple(sorted(p.peer_id for p in alive if self.view.is_straggling(p)))
        same = (unreachable, stalled) == (own.unreachable, own.stalled)
        if same and not (unreachable and now - spoke >= REPEAT * self.heartbeat):
            return False
        self.view.restate(unreachable=unreachable, stalled=stalled)
        return True

    def settle(self) -> bool:
        """Announce older quiet changes to all peers; return whether there are any.

        Accumulated samples are left out: peers announce them when they matter.
        """
        if _matters(self.view.own) == _matters(self.view.loud):
            self._quiet_since = None
            return False
        now = self.clock()
        if self._quiet_since is None:
            self._quiet_since = now
        if now - self._quiet_since < self.heartbeat:
            return False
        self._quiet_since = None
        self.view.restate()
        return True

    def keep(self, peers: frozenset[bytes]) -> None:
        """Drop the reports of all but some peers."""
        for of_peers in (self._statements, self._claimed):
            for peer in of_peers.keys() - peers:
                of_peers.pop(peer)


def _matters(own: Heartbeat) -> Heartbeat:
    return replace(own, version=0, spread=0, samples=0, samples_per_second=0.0)
