"""Group formation: the members of a round become one group, led by the oldest of them.

hivemind's peers look for leaders in the DHT, wait for a window, and may end in several groups.
Here every peer knows the members of the run (:class:`Member`), so all of them name the same leader
without asking. The other members join the leader directly, with hivemind's own messages, and the
group begins when the last one has joined. An early request is held, a late one is refused.

While views differ for a moment, a peer may ask a peer that does not lead. The request is refused,
and the peer asks again. A member that still computes is awaited as long as it is a member; the
membership layer removes members that are dead, or have made no progress for too long. The window
applies to a member that has reached the round and cannot be met there, because a link is cut or a
process hangs. If that member is the leader, the next oldest leads until there is news of the first
one. If it is a follower, the leader begins without it: the follower has missed the round and forms
no other group. A peer whose group has begun tells so to those that come later: it holds their
requests, and answers the question of a leader that waits for it (:class:`BegunRound`). They wait
until that round is over, or join its second attempt.

With a :class:`~rayhive.averaging.quorum.Quorum` a member that still computes is awaited for the
grace period only, which begins at each peer when it knows that the quorum is there. If that member
is the leader, the next oldest leads.

With a :class:`~rayhive.averaging.pairing.Pairing` a round has one group for each pair, and the
older peer of a pair leads it. A request of a peer that the leader does not count among its pair is
refused, and that peer asks again until the views agree. A peer whose partners have ended the round
without it is alone in this round.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from hivemind.averaging.group_info import GroupInfo
from hivemind.dht import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2 as messages

from rayhive.averaging.awaited_members import Follower, Search
from rayhive.averaging.begun_rounds import ASK_S, BegunRound
from rayhive.averaging.join_requests import Ask, JoinRequests, round_of_key
from rayhive.averaging.pairing import Pairing
from rayhive.averaging.quorum import Quorum
from rayhive.membership.event_loop import Notifier, wait_at_most
from rayhive.membership.view import ROUNDS_BEHIND, Member

#: Pause before the next request to a leader that cannot be reached or does not lead [s].
ASK_AGAIN_S = 0.05


class NoOtherPeers(Exception):
    """No other peer takes part in the run, so there is nothing to average."""


class RoundIsOver(Exception):
    """The other peers have averaged this round without this peer."""


class DifferentTensors(Exception):
    """A peer of the run averages tensors of other shapes or types."""


@dataclass(eq=False)
class GroupFormation:
    """One peer's part in forming groups, on one event loop.

    Attributes:
        own: This peer.
        client_mode: Whether other peers cannot call it.
        schema_hash: Fingerprint of its averaged tensors.
        key: Prefix of its group keys; the round follows.
        ask: Sends a request to a leader and returns the stream of its answers.
        quorum: Peers with which a round may begin; None awaits all.
        pairing: Divides the peers of a round into pairs; None makes one group of them.
        patience_left: Time that was left of the last search's patience [s].
    """

    own: PeerID
    client_mode: bool
    schema_hash: bytes
    key: str
    ask: Ask
    quorum: Quorum | None = None
    pairing: Pairing | None = None
    patience_left: float = 0.0
    _members: tuple[Member, ...] = ()
    _met: dict[bytes, int] = field(default_factory=dict)
    _search: Search | None = None
    _past: int = 0
    _begun: int = 0
    _changes: Notifier = field(default_factory=Notifier)

    def set_members(self, members: Sequence[Member]) -> None:
        """Set the members, oldest first; effective at once, also for a running search."""
        self._members = tuple(members)
        known = {member.peer_id for member in members}
        self._met = {peer: round_ for peer, round_ in self._met.items() if peer in known}
        self._changes.notify()

    def known(self) -> frozenset[PeerID]:
        """Return the members that were set last."""
        return frozenset(PeerID(member.peer_id) for member in self._members)

    def leave_behind(self, round_: int) -> None:
        """Note that this peer's part in a round is over; later requests for it are refused."""
        self._past = max(self._past, round_)
        self._changes.notify()

    def roster(self, round_: int) -> list[PeerID]:
        """Return the peers that take part in a round, the leader first if a peer can lead."""
        own = [member for member in self._members if member.peer_id == self.own.to_bytes()]
        expected = set(own + self._expected(round_))
        oldest = [member for member in self._members if member in expected]
        leaders_first = sorted(oldest, key=attrgetter("client_mode"))
        ids = [PeerID(member.peer_id) for member in leaders_first]
        return ids if self.own in ids else [*ids, self.own]

    def _expected(self, round_: int) -> list[Member]:
        """Return the other members that take part in a round.

        A member that was met in a group has finished the round before, whatever it has announced:
        rounds may be faster than announcements.
        """
        own = self.own.to_bytes()
        others = [
            member
            for member in self._members
            if member.peer_id != own
            and round_ <= self._reached(member) + ROUNDS_BEHIND
            and not member.left_out
        ]
        if self.pairing is not None:  # those that have ended the round count: pairs must not change
            pair = self.pairing.group(own, (member.peer_id for member in others), round_)
            others = [member for member in others if member.peer_id in pair]
        return [member for member in others if member.averaged < round_]

    @property
    def _live(self) -> int:
        """Peers of the run, this one included."""
        return len({self.own.to_bytes(), *(member.peer_id for member in self._members)})

    def _goes_on(self, search: Search) -> bool:
        """Update what a search awaits; return whether it goes on."""
        expected, live = self._expected(search.round), self._live
        search.note_arrivals(expected, live)
        awaited = [member for member in expected if member.peer_id not in search.absent]
        there = 1 + sum(member.peer_id not in search.missing for member in awaited)
        return search.has_time(awaited + self._catching_up(search, there))

    def _catching_up(self, search: Search, there: int) -> list[Member]:
        """Return the members left out that a quorum needs, besides those that are there."""
        if there >= search.smallest_group(self._live):
            return []
        return [member for member in self._members if member.left_out]

    def _reached(self, member: Member) -> int:
        """Return the last round that a member has finished for certain."""
        return max(member.round, self._met.get(member.peer_id, 0) - 1)

    async def meet(
        self,
        round_: int,
        gather: bytes,
        window: float,
        patience: float,
        longest: float,
    ) -> GroupInfo:
        """Form the group of a round.

        Args:
            round_: Its number.
            gather: Data of this peer that every peer of the group gets.
            window: Longest wait for a peer that has reached the round and is not met [s].
            patience: Longest wait for any peer, once no member computes [s].
            longest: Longest wait in all cases [s].

        Raises:
            NoOtherPeers: No other peer takes part in the run.
            RoundIsOver: The other peers have averaged this round.
            DifferentTensors: The leader averages tensors of other shapes or types.
            asyncio.TimeoutError: No other peer reached the round in time.
        """
        limit = asyncio.get_running_loop().time() + longest
        search = Search(self.own, round_, gather, window, patience, limit, quorum=self.quorum)
        self._search, self._begun = search, 0
        self._changes.notify()
        others = BegunRound(partial(self._requests.question, round_), self._changes.notify, window)
        try:
            while self._goes_on(search):
                change = self._changes.next_change()
                roster = self._met_roster(search)
                self._check_company(search, roster)
                search.led_by(roster[0])
                group: GroupInfo | None = None
                if roster[0] == self.own:
                    group = self._assemble(search, roster, others)
                    if group is None:
                        await wait_at_most(change, _left(search.next_look(roster)))
                else:
                    others.ask_about(())
                    search.begun = False
                    search.dismiss()
                    group = await self._follow(search, roster[0])
                if group is not None:
                    self._begun = round_
                    self._met.update(dict.fromkeys((p.to_bytes() for p in group.peer_ids), round_))
                    return group
            raise asyncio.TimeoutError(f"no other peer reached round {round_} in time")
        finally:
            self._search = None
            others.ask_about(())
            self.patience_left = max(0.0, _left(search.ends))
            search.dismiss()
            self._changes.notify()

    def _met_roster(self, search: Search) -> list[PeerID]:
        """Return the roster without absent members, and unmet leaders without news of them."""
        search.forgive({member.peer_id: member for member in self._members})
        left_out = search.absent | search.missing.keys()
        return [p for p in self.roster(search.round) if p.to_bytes() not in left_out]

    def _was_met(self, round_: int) -> bool:
        if self.pairing is not None:  # another pair may be faster
            return False
        others = [m for m in self._members if m.peer_id != self.own.to_bytes()]
        return any(member.met >= round_ for member in others)

    def _began_without(self, search: Search) -> bool:
        """Return whether a quorum has averaged the round of a peer that still follows a leader."""
        return search.quorum is not None and self._was_met(search.round)

    def _check_company(self, search: Search, roster: list[PeerID]) -> None:
        # A round has one group: a peer that was not in it must not begin another.
        round_, missing = search.round, set(search.missing)
        if self._was_met(round_):
            raise RoundIsOver(f"round {round_} is over: other peers averaged without this one")
        if len(roster) == 1 and self.quorum is not None and self._catching_up(search, 1):
            return
        if missing and len(roster) == 1:
            raise asyncio.TimeoutError(f"{PeerID(missing.pop())} did not reach round {round_}")
        if len(roster) == 1 or (self.client_mode and roster[0] == self.own):
            raise NoOtherPeers(f"no other peer takes part in round {round_}")

    def _assemble(
        self, search: Search, roster: list[PeerID], others: BegunRound
    ) -> GroupInfo | None:
        """Begin with the followers once all members within their windows have joined.

        Wait as long as members that have not joined say that they have begun the round.
        """
        if self.pairing is not None:
            search.dismiss(keep={peer.to_bytes() for peer in roster})
        else:
            others.ask_about(search.unmet(roster))
        search.note_begun(bool(others.begun))
        if search.begun:
            return None
        if search.awaited(roster) - set(search.followers):
            return None
        if len(search.followers) + 1 < search.smallest_group(self._live):
            return None
        ids = [self.own, *(PeerID(peer) for peer in search.followers)]
        random.shuffle(ids)  # the parts of a reducer must not depend on its age
        gathered = tuple(
            search.gather if peer == self.own else search.followers[peer.to_bytes()].request.gather
            for peer in ids
        )
        group = GroupInfo(DHTID.generate().to_bytes(), tuple(ids), gathered)
        for follower in search.followers.values():
            follower.answer(group)
        return group

    async def rpc_join_group(
        self, request: messages.JoinRequest, remote: PeerID
    ) -> AsyncIterator[messages.MessageFromLeader]:
        """Hold a request until this peer leads its round, then answer with the group."""
        loop = asyncio.get_running_loop()
        round_, ends = round_of_key(request.group_key), loop.time() + request.expiration
        if request.schema_hash != self.schema_hash:
            yield messages.MessageFromLeader(code=messages.BAD_SCHEMA_HASH)
            return
        if not request.expiration:
            yield messages.MessageFromLeader(code=self._how_far(round_))
            return
        told = -math.inf
        while self._search is None or self._search.round != round_:
            left = ends - loop.time()
            if round_ is None or round_ <= self._past or left <= 0:
                yield messages.MessageFromLeader(code=messages.BAD_GROUP_KEY)
                return
            change = self._changes.next_change()
            if self._has_begun(round_):
                if loop.time() >= told + ASK_S:
                    told = loop.time()
                    yield messages.MessageFromLeader(code=messages.ACCEPTED)
                left = min(left, told + ASK_S - loop.time())
            await wait_at_most(change, left)
        search = self._search
        follower = Follower(request, loop.create_future())
        earlier = search.followers.pop(remote.to_bytes(), None)
        if earlier is not None:
            earlier.answer(None)
        search.followers[remote.to_bytes()] = follower
        search.arrived.add(remote.to_bytes())
        self._changes.notify()
        try:
            yield messages.MessageFromLeader(code=messages.ACCEPTED)
            while not (await asyncio.wait({follower.group}, timeout=ASK_S))[0]:
                if search.begun:
                    yield messages.MessageFromLeader(code=messages.ACCEPTED)
            group = follower.group.result()
            if group is None:
                yield messages.MessageFromLeader(code=messages.GROUP_DISBANDED)
                return
            yield messages.MessageFromLeader(
                code=messages.BEGIN_ALLREDUCE,
                group_id=group.group_id,
                ordered_peer_ids=[peer.to_bytes() for peer in group.peer_ids],
                gathered=group.gathered,
            )
        finally:
            if search.followers.get(remote.to_bytes()) is follower:
                del search.followers[remote.to_bytes()]
                self._changes.notify()

    def _how_far(self, round_: int | None) -> int:
        """Return the answer to a question, see :class:`BegunRound`."""
        if round_ is None or round_ <= self._past:
            return int(messages.BAD_GROUP_KEY)
        return int(messages.ACCEPTED if self._has_begun(round_) else messages.GROUP_DISBANDED)

    def _has_begun(self, round_: int) -> bool:
        """Return whether this peer's group of a round has begun, and its round is not over."""
        return self._begun == round_ and self.pairing is None

    @property
    def _requests(self) -> JoinRequests:
        return JoinRequests(self.schema_hash, self.client_mode, self.key, self.ask)

    async def _follow(self, search: Search, leader: PeerID) -> GroupInfo | None:
        """Ask a leader for its group; return None if another peer leads by now, or on failure.

        A leader that has reached the round, and does not accept until its window ends, counts as
        missing.
        """
        loop = asyncio.get_running_loop()
        accepted = asyncio.Event()
        answer = asyncio.ensure_future(self._requests.join(leader, search, accepted))
        try:
            while not answer.done() and self._goes_on(search):
                if self._met_roster(search)[0] != leader or self._began_without(search):
                    return None
                until = search.ends if accepted.is_set() else search.window_ends(leader)
                if loop.time() >= until:
                    known = {member.peer_id: member for member in self._members}
                    search.missing[leader.to_bytes()] = known.get(leader.to_bytes())
                    return None
                changed = asyncio.ensure_future(self._changes.next_change().wait())
                await asyncio.wait(
                    {answer, changed},
                    timeout=min(until, search.grace_ends) - loop.time(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                changed.cancel()
            message = answer.result() if answer.done() else None
        except Exception:  # out of reach; the membership layer decides whether it is lost
            message = None
        finally:
            answer.cancel()
        if message is None or message.code == messages.GROUP_DISBANDED:
            await wait_at_most(self._changes.next_change(), ASK_AGAIN_S)
            return None
        if message.code == messages.BAD_SCHEMA_HASH:
            raise DifferentTensors(f"{leader} averages tensors of other shapes or types")
        if message.code != messages.BEGIN_ALLREDUCE:  # it has ended the round, and will announce it
            await wait_at_most(self._changes.next_change(), ASK_AGAIN_S)
            return None
        ids = tuple(PeerID(peer) for peer in message.ordered_peer_ids)
        return GroupInfo(message.group_id, ids, tuple(message.gathered))


def _left(moment: float) -> float:
    return moment - asyncio.get_running_loop().time()
