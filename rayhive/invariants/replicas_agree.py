"""Invariant ``replicas_agree``: all replicas hold the same parameters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import combinations
from typing import TypeAlias

from rayhive import events
from rayhive.invariants.base import Invariant, settled
from rayhive.spec.axes.group_size import PAIR
from rayhive.timeline import Timeline

Averaging: TypeAlias = events.Round | events.StateRound

#: Relative distance that rounding alone may cause between two replicas of unequal hardware.
EXACT = 1e-5
#: Relative distance that a lossy codec may cause between two averagings of the parameters, or in
#: one if it encodes the parameters themselves. It is ten times the measured distance with 16 bits,
#: and three times with 8.
LOSS = {"none": 0.0, "float16": 0.02, "scaled_float16": 0.02}
EIGHT_BITS = 0.3
#: Greatest number of rounds for which a replica may be astray.
ASTRAY_ROUNDS = 10
#: Largest relative distance of two replicas whose rounds were averaged in pairs: three times the
#: largest one in the first rounds of a scenario (``docs/gossip.md``).
SPREAD = 0.5
#: Rounds after an own step, or a loaded state, in which a replica is not compared.
UNSETTLED_ROUNDS = 10


class ReplicasAgree(Invariant):
    """After every round all replicas are equal, but for the loss of the parameters' codec.

    The distance of two replicas is estimated from the sketches of their weights after the same
    round (:mod:`rayhive.peer.measurements`), relative to the larger norm.

    A replica is *astray* from a round that it did not average completely with other peers
    (gradients or parameters), that several groups averaged, whose parameters other peers averaged
    without it, or in which it loaded a state. It stays astray up to its next complete averaging of
    parameters in one group; with delays this takes effect one round later. Replicas that are astray
    are not compared.

    A replica that lives to the end may be astray and unequal to the others for at most
    :data:`ASTRAY_ROUNDS` (10) rounds, unless a fault that separated peers was not healed ten
    seconds before the end. Rounds count from the moment when the first of the other peers that live
    to the end began to train.

    The tolerance is 0 for peers that round alike, by ``arithmetic`` of ``peer_ready``: their
    replicas are equal to the bit. It is 1e-5 for other peers, and for logs of version 0.1, which
    lack that field; and the loss of the parameters' codec is added. The codec of the gradients adds
    nothing, because all peers apply the same decoded average (:mod:`rayhive.averaging.answers`).

    Replicas that average in pairs (``group_size: 2``) never become equal. Their distance is at most
    0.5 then (:func:`spreads`).
    """

    about = "Replicas agree after every round, to the bit where peers round alike."
    of_swarm = True

    def check(self, log: Timeline) -> list[str]:
        """Return the pairs of replicas that differ, each with its largest distance."""
        if log.spec.configuration.group_size == PAIR:
            return list(self._too_far(log))
        whole = _whole(log)
        met = {e.round for n in log.trained for e in log.of(events.StateRound, n) if whole(e)}
        weights = {
            name: {event.round: event for event in log.of(events.Weights, name) if event.finite}
            for name in log.trained
        }
        astray = {name: _astray(log, name, whole, met) for name in log.trained}
        equal = {name: _equal(log, name, weights) for name in log.living}
        lasting = ((name, astray[name] - equal[name]) for name in log.living)
        wrong = [text for name, rounds in lasting for text in self._lasting(log, name, rounds)]
        for (a, b), rounds in _compared(log.trained, weights, astray).items():
            tolerance = tolerance_of(log, a, b)
            self.checked += len(rounds)
            distances = [weights[a][n].distance(weights[b][n]) for n in rounds]
            worst = max(distances, default=0.0)
            if worst > tolerance:
                where = f"after round {rounds[distances.index(worst)]}, at most {tolerance:.2g}"
                wrong.append(f"{a} and {b} differ by {worst:.2g} {where}")
        return wrong

    def _too_far(self, log: Timeline) -> Iterator[str]:
        for a, b, worst, rounds in spreads(log):
            self.checked += rounds
            if worst > SPREAD:
                yield f"{a} and {b} differ by {worst:.2g}, in pairs at most {SPREAD:.2g}"

    def _lasting(self, log: Timeline, name: str, astray: frozenset[int]) -> Iterator[str]:
        alone = len(log.living) < 2
        apart = any(
            settled(fault) > log.end for fault in log.faults if fault.effect in events.APART
        )
        others = (log.incarnations[peer].started for peer in log.living if peer != name)
        company = min((t for t in others if t is not None), default=math.inf)
        rounds = [event.round for event in log.of(events.Weights, name) if event.t >= company]
        last = next((at for at, n in enumerate(reversed(rounds)) if n not in astray), len(rounds))
        if not (alone or apart) and rounds:
            self.checked += 1
            if last > ASTRAY_ROUNDS:
                yield f"{name}: not made equal to the other replicas in its last {last} rounds"


def _compared(
    names: Sequence[str],
    weights: Mapping[str, Mapping[int, events.Weights]],
    astray: Mapping[str, Set[int]],
) -> dict[tuple[str, str], list[int]]:
    """Return the pairs of replicas that have rounds in common in which neither is astray.

    Time grows with the pairs that exist at the same time, not with all pairs of incarnations.

    Returns:
        Pairs in the order of ``names`` -> their rounds, sorted.
    """
    present: dict[int, list[int]] = defaultdict(list)
    for place, name in enumerate(names):
        for number in weights[name].keys() - astray[name]:
            present[number].append(place)
    pairs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number in sorted(present):
        for pair in combinations(present[number], 2):
            pairs[pair].append(number)
    return {(names[a], names[b]): pairs[a, b] for a, b in sorted(pairs)}


def tolerance_of(log: Timeline, a: str, b: str) -> float:
    """Return the relative distance within which the replicas of two peers agree."""
    loss = LOSS.get(log.spec.configuration.state_codec, EIGHT_BITS)
    one, other = ({event.arithmetic for event in log.of(events.PeerReady, name)} for name in (a, b))
    alike = one == other and None not in one and len(one) == 1
    return loss if alike else loss + EXACT


def _equal(
    log: Timeline, name: str, weights: Mapping[str, Mapping[int, events.Weights]]
) -> frozenset[int]:
    """Return the rounds after which a replica agrees with another one that lives to the end."""
    return frozenset(
        n
        for other in log.living
        if other != name
        for tolerance in [tolerance_of(log, name, other)]
        for n in weights[name].keys() & weights[other].keys()
        if weights[name][n].distance(weights[other][n]) <= tolerance
    )


def _averagings(log: Timeline, name: str) -> list[Averaging]:
    return [*log.of(events.Round, name), *log.of(events.StateRound, name)]


def _whole(log: Timeline) -> Callable[[Averaging], bool]:
    """Return a test whether a round was averaged completely, by all its peers in one group."""
    grouped = Counter(
        (event.kind, event.round)
        for name in log.trained
        for event in _averagings(log, name)
        if event.outcome in events.GROUPED
    )

    def whole(event: Averaging) -> bool:
        complete = event.outcome == "averaged" and (event.fraction or 1.0) >= 1.0
        return complete and (event.group_size or 1) >= grouped[event.kind, event.round]

    return whole


def _astray(
    log: Timeline, name: str, whole: Callable[[Averaging], bool], met: Set[int]
) -> frozenset[int]:
    """Return the rounds after which an incarnation may be astray."""
    lag = 0 if log.spec.configuration.delay == "none" else 1
    averaged = log.of(events.StateRound, name)
    finished = {event.round for event in log.of(events.Weights, name)}
    strayed = {event.round for event in _averagings(log, name) if not whole(event)}
    strayed |= (met & finished) - {event.round for event in averaged}
    # A loaded state may be of an earlier round.
    strayed |= {event.round for event in log.of(events.StateLoaded, name)}
    complete = sorted(event.round for event in averaged if whole(event))
    end = max(finished, default=0) + 1
    astray: set[int] = set()
    reached = min(strayed, default=0)
    for round_ in sorted(strayed):
        at = bisect_left(complete, round_)
        until = (complete[at] if at < len(complete) else end) + lag
        astray.update(range(max(round_, reached), until))
        reached = max(reached, until)
    return frozenset(astray)


def spreads(log: Timeline) -> Iterator[tuple[str, str, float, int]]:
    """Yield two replicas, their largest distance, and the number of compared rounds.

    The distance is relative to the larger norm. Replicas are compared after the same round, while
    both have averaged their last :data:`UNSETTLED_ROUNDS` (10) rounds in a group, and outside of
    the time of faults that separate peers.
    """
    apart = [(fault.fired, settled(fault)) for fault in log.faults if fault.effect in events.APART]
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
