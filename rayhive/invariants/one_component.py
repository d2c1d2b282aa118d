"""Invariant ``one_component``: all living peers form one swarm."""

from __future__ import annotations

from collections.abc import Iterator

from rayhive.events import PeerFinished, Round
from rayhive.invariants.base import Invariant, settled
from rayhive.timeline import Timeline

#: Number of last rounds of each peer that are checked.
ROUNDS = 3
#: Time after a join or a loss in which rounds are not checked [s].
CHANGE_S = 3.0


class OneComponent(Invariant):
    """At the end every living peer sees all living peers and averages with all of them.

    The check uses the last :data:`ROUNDS` (3) rounds of each living peer before the first peer
    finished, more than ten seconds after the last fault and heal and :data:`CHANGE_S` (3) seconds
    after the last join and loss. In one of them ``live_peers``, and in one ``group_size``, must be
    the number of living peers, 2 in pairs, or the quorum (axis ``min_peers``), which is more than
    half of the peers. Two disjoint components never satisfy this. A peer with fewer rounds in that
    time is not checked.
    """

    about = "All living peers are in one component: they see each other and average together."
    of_swarm = True

    def check(self, log: Timeline) -> list[str]:
        """Return the peers that do not see, or do not average with, all other peers."""
        count = len(log.living)
        if count < 2:
            return []
        configuration = log.spec.configuration
        group = configuration.group_peers(count)
        if configuration.min_peers is not None:
            group = min(count, max(configuration.min_peers, count // 2 + 1))
        begin = max(_settled(log), default=0.0)
        finished = [event.t for name in log.living for event in log.of(PeerFinished, name)]
        until = min(finished, default=log.end)
        wrong = []
        for name in log.living:
            rounds = [e for e in log.of(Round, name) if begin < e.t <= until][-ROUNDS:]
            if len(rounds) < ROUNDS:
                continue
            self.checked += 1
            seen = max(event.live_peers or 0 for event in rounds)
            met = max(event.group_size or 1 for event in rounds)
            if seen < count or met < group:
                wrong.append(f"{name}: saw {seen} and averaged with {met} of {count} peers")
        return wrong


def _settled(log: Timeline) -> Iterator[float]:
    for fault in log.faults:
        yield settled(fault)
    for name, peer in log.incarnations.items():
        begun = peer.started if peer.joined(log.spec.swarm.peers) else None
        for moment in (begun, log.gone(name)):
            if moment is not None:
                yield moment + CHANGE_S
