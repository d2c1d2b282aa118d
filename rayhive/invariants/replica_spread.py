"""Spread of replicas that average in pairs, and so never become equal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from rayhive import events
from rayhive.invariants.base import settled
from rayhive.timeline import Timeline

#: Largest relative distance of two replicas whose rounds were averaged in pairs.
SPREAD = 0.5
#: Rounds after an own step, or a loaded state, in which a replica is not compared.
UNSETTLED_ROUNDS = 10


def spreads(log: Timeline) -> Iterator[tuple[str, str, float, int]]:
    """Yield two replicas, their largest distance, and the number of compared rounds.

    The distance is relative to the larger norm. Replicas are compared after the same round, while
    both have averaged their last :data:`UNSETTLED_ROUNDS` (10) rounds in a group, and outside of
    the time of faults that separate peers.
    """
    apart = [
        (fault.fired, settled(fault)) for fault in log.faults if fault.effect in events.APART
    ]
    weights = {
        name: {
            event.round: event
            for event in log.of(events.Weights, name)
            if event.finite and not any(begin <= event.t <= end for begin, end in apart)
        }
        for name in log.trained
    }
    left_out = {name: _unsettled(log, name) for name in log.trained}
    for a, b in combinations(log.trained, 2):
        rounds = (weights[a].keys() & weights[b].keys()) - left_out[a] - left_out[b]
        if rounds:
            worst = max(weights[a][n].distance(weights[b][n]) for n in rounds)
            yield a, b, worst, len(rounds)


def _unsettled(log: Timeline, name: str) -> frozenset[int]:
    own = {e.round for e in log.of(events.Round, name) if e.outcome not in events.GROUPED}
    own |= {event.round for event in log.of(events.StateLoaded, name)}
    return frozenset(n for each in own for n in range(each, each + UNSETTLED_ROUNDS + 1))
