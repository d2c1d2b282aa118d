"""Membership protocol of one peer, without input and output.

The clock is passed in. Calls that are due are returned, and their answers are handed in
(:mod:`rayhive.membership.calls`).

In a small swarm, each peer calls all others: at once after a change that matters, and otherwise
once per heartbeat. In a large swarm, each peer calls its neighbours on a few rings, and passes on
changes, so that a change reaches all of n peers within O(log n) hops. A message holds only the
changes that its receiver lacks.

Two failed calls in a row, or silence, make a peer dead for its watchers. A call does not count as
failed, and a peer is not silent, while bulk data flow between both. In a small swarm, all peers are
watchers. In a large one, the watchers report the loss in their announcements, and the other
watchers then call the peer at once. The rest of the swarm gives it up after the reports of most
watchers, or after three reports without an objection of the peer. This is the suspicion of SWIM
(Das et al., 2002), which several independent reports shorten as in Lifeguard (Dadgar et al., 2017),
among the observers of Rapid (Suresh et al., 2018). A peer that fewer watchers have reported is
called once. A peer that loses a quarter of its neighbours at once may be cut off itself, and calls
all peers once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rayhive.membership.lanes import Call, Lane
from rayhive.membership.letters import Letter
from rayhive.membership.news import Link, NewsLog
from rayhive.membership.reports import Reports
from rayhive.membership.topology import Topology, topology_of
from rayhive.membership.view import Heartbeat, MembershipView

#: Calls that fail in a row before a peer counts as dead.
FAILURES = 2
#: Interval between two calls of a peer in client mode, which cannot be called itself [s].
CLIENT_PAUSE_S = 0.1
#: How long a lost peer is called again [s]; a link may be cut for so long.
RETRY_FOR_S = 3600.0
#: After this time a lost peer is called less often [s], by this factor.
SELDOM_AFTER_S, SELDOM = 600.0, 5
#: In a large swarm: interval between two calls of a neighbour with news [s], and largest number of
#: its calls under way. A call takes the news of the whole interval along.
PACE_S, CALLS = 0.02, 4
#: A peer that loses this share of its neighbours at once calls all peers.
CUT_OFF = 0.25


@dataclass(eq=False)
class Protocol:
    """The membership protocol of a peer.

    The methods lock the view by themselves.

    Attributes:
        view: The peer's membership view.
        clock: Monotonic time [s]; that of the view.
        heartbeat: Interval between two heartbeats [s].
        forget_after: How long a dead peer is remembered [s].
        log: News of the view.
        topology: The present neighbours.
        patience: Longest time of a call [s].
        arrivals: Number of times that a peer came or returned.
        changes: Number of times that the view may have changed.
    """

    view: MembershipView
    clock: Callable[[], float]
    heartbeat: float
    forget_after: float = RETRY_FOR_S
    log: NewsLog = field(default_factory=NewsLog)
    topology: Topology = field(init=False)
    arrivals: int = 0
    changes: int = 0
    _lanes: dict[bytes, Lane] = field(default_factory=dict)
    _links: dict[bytes, Link] = field(default_factory=dict)
    _checks: list[bytes] = field(default_factory=list)
    _checked: float = -math.inf
    _ticked: float = -math.inf
    _spoke: float = -math.inf
    _members: tuple[frozenset[bytes], frozenset[bytes]] = (frozenset(), frozenset())

    def __post_init__(self) -> None:
        self.patience = self.view.silence / FAILURES
        self.topology = topology_of(self.view)
        self._reports = Reports(self.view, self.clock, self.heartbeat)
        self._note_own()

    # -- calls -------------------------------------------------------------------------------------

    def due(self) -> list[Call]:
        """Return the calls to begin now."""
        with self.view.lock:
            now = self.clock()
            if now >= self._ticked + self.heartbeat / 2:
                if now > self._ticked + 2 * self.heartbeat and self._ticked > -math.inf:
                    self._reports.was_asleep()
                self._ticked = now
                self._tick()
            elif now >= self._reports.next_verdict():
                self._follow()
            calls = [Call(peer, now, check=True) for peer in self._checks]
            self._checks.clear()
            due = [peer for peer, lane in self._lanes.items() if self._is_due(peer, lane, now)]
            return calls + [self._begin(peer, now) for peer in due]

    def next_time(self) -> float:
        """Return the time at which :meth:`due` has to be called again, if nothing happens."""
        with self.view.lock:
            times = [self._ticked + self.heartbeat / 2, self._reports.next_verdict()]
            for lane in self._lanes.values():
                if lane.running == 0:
                    times.append(lane.due)
                if lane.news and lane.running < self._most(lane):
                    times.append(lane.began + self._pace)
            return min(times)

    @property
    def _pace(self) -> float:
        return 0.0 if self.topology.small else PACE_S

    def _most(self, lane: Lane) -> int:
        return 1 if self.topology.small or lane.failures else CALLS

    def _is_due(self, peer: bytes, lane: Lane, now: float) -> bool:
        if lane.running == 0 and now >= lane.due:
            return True
        if not lane.news or lane.running >= self._most(lane) or now < lane.began + self._pace:
            return False
        # a dial in vain to a lost peer would delay the next one
        lane.news = self.view.is_alive(peer) and self._has_news(peer)
        return lane.news

    def _has_news(self, peer: bytes) -> bool:
        """Return whether no message has taken the news to a peer; an answer may have done so."""
        link = self._link(peer)
        if self.topology.small:
            return self.view.own.peer_id in self.log.since(link.sent)
        return any(each != peer for each in link.lacks(self.log, link.sent, self.view.find))

    def _begin(self, peer: bytes, now: float) -> Call:
        lane = self._lanes[peer]
        lane.running += 1
        lane.began, lane.news = now, False
        lane.due = now + self._pause(peer, lane)
        return Call(peer, now, lost=lane.failures >= FAILURES)

    def _pause(self, peer: bytes, lane: Lane) -> float:
        """Return the time from a call without news to the next one [s]."""
        pause = self.heartbeat
        if self.view.own.client_mode:  # it receives the state of other peers only in answers
            pause = CLIENT_PAUSE_S * (1 if self.topology.small else len(self.topology.lanes))
        elif peer not in self.topology.beats and lane.failures == 0:
            return math.inf
        if lane.failures >= FAILURES and self.clock() - lane.answered > SELDOM_AFTER_S:
            pause *= SELDOM
        return pause

    def letter(self, peer: bytes, call: Call | None = None) -> Letter:
        """Return the message to a peer, when it is about to be sent.

        Args:
            peer: Id of the peer.
            call: The call; None for a peer that need not be known.
        """
        with self.view.lock:
            if call is None or call.check:
                self._link(peer).missed()
            return self._letter(peer)

    def answered(self, call: Call, letter: Letter) -> None:
        """Take in the answer to a call."""
        with self.view.lock:
            lane = self._lanes.get(call.peer)
            if lane is not None and not call.check:
                lane.running = max(0, lane.running - 1)
                lane.failures, lane.answered = 0, self.clock()
                if self.topology.small or call.lost:
                    lane.due = lane.answered + self._pause(call.peer, lane)
            self.take(letter)

    def failed(self, call: Call) -> bool:
        """Note a call without an answer; return whether the peer was given up for that."""
        with self.view.lock:
            now, peer = self.clock(), call.peer
            self._link(peer).missed()
            lane = self._lanes.get(peer)
            if call.check:
                return not (self._shows_life(call) or self._was_heard(call)) and self._give_up(peer)
            if lane is None:
                return False
            lane.running = max(0, lane.running - 1)
            if self._shows_life(call):
                lane.failures, lane.due = 0, now + self._pause(peer, lane)
                return False
            # calls that ran at the same time have failed for one reason
            if lane.failures == 0 or call.began >= lane.failed:
                lane.failures, lane.failed = lane.failures + 1, now
            lane.due = now if lane.failures < FAILURES else now + self._pause(peer, lane)
            return lane.failures == FAILURES and self._give_up(peer)

    def _shows_life(self, call: Call) -> bool:
        """Return whether a peer lived during a call: its answer is late beside bulk data."""
        return self.view.is_alive(call.peer) and self.view.sign_of(call.peer) >= call.began

    def _was_heard(self, call: Call) -> bool:
        """Return whether messages say that a peer lived after a call began: its link has healed."""
        if self.view.watches(call.peer):  # what others say does not count
            return self._link(call.peer).heard > call.began
        return self.view.heard_of(call.peer) > call.began

    def _give_up(self, peer: bytes) -> bool:
        lived = self.view.is_alive(peer)
        self.view.give_up(peer)
        self._report()
        self._follow()
        return lived

    # -- messages ----------------------------------------------------------------------------------

    def receive(self, letter: Letter) -> Letter:
        """Take in a call of another peer, and return the answer."""
        with self.view.lock:
            self.take(letter)
            return self._letter(letter.sender)

    def announce(self) -> None:
        """Send this peer's state to all, because it has changed.

        A lost peer is not called: a dial in vain would delay the next one.
        """
        with self.view.lock:
            self._note_own()
            self._push(self._lanes)

    def farewell(self) -> list[Call]:
        """Return the last calls, to live neighbours."""
        with self.view.lock:
            self._note_own()
            now = self.clock()
            return [Call(p, now, check=True) for p in self._lanes if self.view.is_alive(p)]

    def take(self, letter: Letter) -> None:
        """Take in a message."""
        with self.view.lock:
            link = self._link(letter.sender)
            link.heard = self.clock()
            link.take(letter.log_id, letter.start, letter.end)
            if letter.have_log == self.log.log_id:  # else it knows a former incarnation at most
                link.acknowledge(letter.have, letter.have_version, self.clock())
            records = list(letter.records)
            sender = self.view.find(letter.sender)
            if sender is not None:  # any message of a peer proves that it lives
                records.append((sender, 0.0, letter.idle))
            news = [self._take_record(letter.sender, link, *record) for record in records]
            if any(news):
                self._follow()
                if not self.topology.small:
                    self._push(self.topology.beats)  # the others take it along in their calls

    def _take_record(
        self, sender: bytes, link: Link, heartbeat: Heartbeat, age: float, idle: float
    ) -> bool:
        """Take in one announcement; return whether other peers have to know of it."""
        peer, known = heartbeat.peer_id, self.view.find(heartbeat.peer_id)
        link.known[peer] = heartbeat.spread
        if peer == self.view.own.peer_id:
            return False
        if known is not None and not heartbeat.addresses:
            heartbeat = replace(heartbeat, addresses=known.addresses)
        lived = self.view.is_alive(peer)
        age = 0.0 if peer == sender else max(age, 1e-6)
        is_newer = self.view.receive(heartbeat, age, idle)
        lives = self.view.is_alive(peer)
        self.changes += is_newer or lives != lived
        if is_newer:
            self._reports.note(heartbeat, self.clock() - age)
            lane = self._lanes.get(peer)
            if lane is not None and not lives:
                lane.due = min(lane.due, self.clock())  # a lost peer is back: call it at once
        if not lives and not self.view.watches(peer):
            self._reports.claim(peer)
        elif not lives and self._reports.dispute(peer, is_newer):
            self._report()
        if lives and not lived:
            self.arrivals += 1
            for other in self._links.values():
                other.known.pop(peer, None)
            if known is not None and peer == sender:
                link.reset()
        elif known is not None and heartbeat.spread <= known.spread:
            return False
        self.log.add(peer, heartbeat.addresses)
        return True

    def _link(self, peer: bytes) -> Link:
        return self._links.setdefault(peer, Link())

    def _note_own(self) -> None:
        self.log.add(self.view.own.peer_id, self.view.own.addresses)
        self._spoke = self.clock()

    def _push(self, peers: Iterable[bytes]) -> None:
        for peer in peers:
            self._lanes[peer].news = True

    def _letter(self, peer: bytes) -> Letter:
        own, link = self.view.own, self._link(peer)
        start = link.send(self.log.position, self.clock(), self.patience)
        # every message is a sign of life, so an unchanged announcement is not repeated
        wanted = [] if own.version <= link.has_version else [own.peer_id]
        news = link.lacks(self.log, start, self.view.find)
        wanted += [each for each in news if each not in (peer, own.peer_id)]
        records = []
        for each in wanted:
            record = self.view.record(each)
            if record is not None:
                records.append(record)
        known = self.view.find(peer)
        return Letter(
            sender=own.peer_id,
            idle=self.view.idle(),
            log_id=self.log.log_id,
            start=start,
            end=self.log.position,
            have_log=link.their_log,
            have=link.have,
            have_version=0 if known is None else known.version,
            records=records,
            bare=frozenset(p for p in wanted if self.log.knows_addresses(p, link.acknowledged)),
        )

    # -- members -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Notice what no message tells."""
        self.changes += 1
        self.view.note_losses()
        if self.view.forget(self.forget_after):
            self._rearrange(self.clock())
        self._report()
        self._follow()
        self._checks += self._reports.doubted()
        if self._reports.settle():
            self._note_own()  # it goes out with the next heartbeats

    def _report(self) -> None:
        """Tell the other peers which of the watched ones are lost."""
        if self._reports.update(self.topology, self._spoke):
            self.announce()

    def _follow(self) -> None:
        """Follow a change of the view."""
        self.changes += 1
        now = self.clock()
        for peer in self._reports.verdicts(self.topology):
            self.view.give_up(peer)
        for peer in self._reports.suspects():
            lane = self._lanes.get(peer)
            if lane is not None and lane.running == 0:
                lane.due = min(lane.due, now)
        if self._reports.objects(self._spoke):
            self.view.restate()
            self.announce()
        members = (frozenset(self.view.alive_ids()), self.view.lost())
        if members != self._members:
            self._members = members
            self._rearrange(now)
            self._look_around(now)

    def _rearrange(self, now: float) -> None:
        """Call and watch the neighbours among the present members."""
        self.topology = topology_of(self.view)
        self.view.watch(self.topology.watched)
        known = frozenset(heartbeat.peer_id for heartbeat in self.view.known())
        for peer in self._lanes.keys() - self.topology.lanes:
            del self._lanes[peer]
        for peer in sorted(self.topology.lanes - self._lanes.keys()):
            failures = 0 if self.view.is_alive(peer) else FAILURES
            self._lanes[peer] = Lane(due=now, answered=now, failures=failures, news=True)
        for peer in self.topology.beats:
            if self._lanes[peer].due == math.inf:
                self._lanes[peer].due = now
        for peer in self._links.keys() - known:
            del self._links[peer]
        self.log.keep(known | {self.view.own.peer_id})
        self._reports.keep(known)

    def _look_around(self, now: float) -> None:
        """Call all peers once if so many neighbours are lost that this peer may be cut off."""
        if self.topology.small or now - self._checked < 2 * self.view.silence:
            return
        home, span = self.topology.home, 2 * self.heartbeat
        lost = [peer for peer in home if now - self.view.lost_at(peer) <= span]
        if len(lost) >= max(2, CUT_OFF * len(home)):
            self._checked = now
            self._checks = sorted(self.topology.rings.peers - home - {self.view.own.peer_id})
