"""Awaited members of a search for a round's group, and the times until which they are awaited.

A member that still computes has no window; the membership layer removes members that are dead or
make no progress. A member that has reached the round is awaited until its window ends. With a
quorum, members that still compute are awaited for the grace period after the quorum is there.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2 as messages

from rayhive.averaging.quorum import Quorum
from rayhive.membership.view import Member

#: Resolution of a loop's clock: a timer may fire this much too early [s].
CLOCK_S = 1e-3
#: Smallest number of peers of a group.
SMALLEST_GROUP = 2


@dataclass(eq=False)
class Follower:
    """A peer that has asked to join, and the group that it gets as an answer."""

    request: messages.JoinRequest
    group: asyncio.Future[GroupInfo | None]

    def answer(self, group: GroupInfo | None) -> None:
        """Answer with the group, or with None to refuse; the first answer counts."""
        if not self.group.done():
            self.group.set_result(group)


@dataclass(eq=False)
class Search:
    """Search of one peer for the group of a round; times are of the event loop [s].

    Attributes:
        own: The peer itself.
        round: The round.
        gather: Data of this peer for the group.
        window: Longest wait for a member that has reached the round and is not met [s].
        patience: Longest wait for any member, once no member computes [s].
        limit: Time at which the search ends in all cases.
        followers: Peers that have asked to join a group led by this one.
        arrived: Ids of the peers that have asked so far, or accepted this one.
        missing: Leaders that were not met in their window, as they were known then.
        quorum: Peers with which the round may begin; None awaits all.
        absent: Members that still compute when the grace period is over.
        grace_ends: End of the running grace period; infinite if there is none.
        begun: Whether other members have begun the round without this peer.
    """

    own: PeerID
    round: int
    gather: bytes
    window: float
    patience: float
    limit: float
    followers: dict[bytes, Follower] = field(default_factory=dict)
    arrived: set[bytes] = field(default_factory=set)
    missing: dict[bytes, Member | None] = field(default_factory=dict)
    quorum: Quorum | None = None
    absent: frozenset[bytes] = frozenset()
    grace_ends: float = math.inf
    begun: bool = False
    _quorum_since: float | None = None
    _since: dict[bytes, float] = field(default_factory=dict)
    _extends: bool = True
    _leader: PeerID | None = None

    def __post_init__(self) -> None:
        #: Time at which the search ends if nothing changes.
        self.ends = self.limit

    def has_time(self, members: Iterable[Member]) -> bool:
        """Update the windows from the awaited members; return whether the search goes on."""
        now, computing = asyncio.get_running_loop().time(), False
        for member in members:
            if member.computes(self.round):
                computing = True
                self._since.pop(member.peer_id, None)
            else:
                self._since.setdefault(member.peer_id, now)
        if computing or self._extends:  # the patience begins when the last member has come
            self.ends = min(self.limit, now + self.patience)
        self._extends = computing
        return now < self.ends

    def note_arrivals(self, expected: Collection[Member], live: int) -> None:
        """Update the grace period, and the members that are no longer awaited after it.

        Args:
            expected: Other members that take part in the round.
            live: All peers of the run, this one included.
        """
        if self.quorum is None:
            return
        now = asyncio.get_running_loop().time()
        computing = frozenset(m.peer_id for m in expected if m.computes(self.round))
        computing -= self.arrived  # a message may overtake the announcement
        arrived = 1 + len(expected) - len(computing)
        self.absent, self.grace_ends = frozenset(), math.inf
        if arrived < self.quorum.size(live) or not computing:
            self._quorum_since = None
            return
        if self._quorum_since is None:
            self._quorum_since = now
        ends = self._quorum_since + self.quorum.grace_s
        if now >= ends - CLOCK_S:
            self.absent = computing
        else:
            self.grace_ends = ends

    def smallest_group(self, live: int) -> int:
        """Return the smallest size of a group among this many live peers."""
        return SMALLEST_GROUP if self.quorum is None else self.quorum.size(live)

    def forgive(self, known: dict[bytes, Member]) -> None:
        """Stop treating a leader as missing once there is news of it."""
        for peer, then in list(self.missing.items()):
            if known.get(peer) != then:
                del self.missing[peer]
                self._since.pop(peer, None)

    def led_by(self, leader: PeerID) -> None:
        """Note the leader; windows begin anew with each leader."""
        if leader != self._leader:
            self._leader = leader
            self._begin_windows()

    def note_begun(self, begun: bool) -> None:
        """Note whether other members have begun the round without this peer.

        While they have, the patience begins anew. After their attempt failed, the windows do.
        """
        if begun:
            self._extends = True
        elif self.begun:
            self._begin_windows()
        self.begun = begun

    def _begin_windows(self) -> None:
        self._since = dict.fromkeys(self._since, asyncio.get_running_loop().time())

    def window_ends(self, peer: PeerID) -> float:
        """Return the time until which a peer is awaited."""
        since = self._since.get(peer.to_bytes())
        return self.ends if since is None else min(self.ends, since + self.window)

    def awaited(self, roster: Iterable[PeerID]) -> set[bytes]:
        """Return the ids of a roster's other peers whose windows have not ended."""
        now = asyncio.get_running_loop().time()
        return {p.to_bytes() for p in roster if p != self.own and now < self.window_ends(p)}

    def unmet(self, roster: Iterable[PeerID]) -> set[PeerID]:
        """Return a roster's other peers that have reached the round and have not joined."""
        return {p for p in roster if p.to_bytes() in self._since.keys() - self.followers.keys()}

    def next_look(self, roster: Iterable[PeerID]) -> float:
        """Return the time at which the next window of a roster ends, or the search."""
        now = asyncio.get_running_loop().time()
        windows = (self.window_ends(peer) for peer in roster if peer != self.own)
        return min([self.ends, self.grace_ends, *(end for end in windows if end > now)])

    def dismiss(self, keep: Collection[bytes] = ()) -> None:
        """Refuse the followers that this peer does not lead.

        Args:
            keep: Ids of those that it leads.
        """
        for peer in self.followers.keys() - set(keep):
            self.followers.pop(peer).answer(None)
