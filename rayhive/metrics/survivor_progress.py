"""Progress of a fault's survivors: their rounds without its targets, and how long they stalled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from rayhive.events import APART, GROUPED, Event
from rayhive.metrics.live_capacity import Capacity, fault_windows, overlap
from rayhive.metrics.stats import Time
from rayhive.metrics.timeline import Timeline

#: Effects of faults after which the others' groups lack the targets.
AWAY = APART | {"gone"}


@dataclass(frozen=True)
class Strike:
    """A fault as its survivors meet it.

    Attributes:
        fired: When it took effect [s, Unix time].
        healed: When it was healed; None if it was not.
        effect: Its effect, of :data:`rayhive.faults.kind.Effect`.
        targets: Names of the peers that it was about.
    """

    fired: float
    healed: float | None
    effect: str
    targets: frozenset[str]


@dataclass(frozen=True)
class Step:
    """A round that a survivor applied after a fault.

    Attributes:
        peer: Its name.
        round: The round.
        moment: When it was reported [s, Unix time].
        counts: Whether it is progress without the targets.
    """

    peer: str
    round: int
    moment: float
    counts: bool


class Groups:
    """Membership of every averaging group, as its members recorded it.

    Args:
        timeline: The replicate.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._ids = {event["peer"]: event.get("peer_id") for event in timeline.of("dht_ready")}
        # with local updates, groups form only to average parameters
        kind = "state_round" if timeline.spec.swarm.use_local_updates else "round"
        self._by_round = timeline.by_round(kind)
        self._own = {(event["peer"], event["round"]): event for event in timeline.of(kind)}

    def held(self, peer: str, round_: int, targets: frozenset[str]) -> bool:
        """Return whether a peer's group of a round held one of the targets.

        Logs from before ``round`` had ``group`` give only its size. There a group held a target if
        it was larger than the number of other peers that report the same round with that size.
        """
        own = self._own.get((peer, round_))
        if own is None or own["outcome"] not in GROUPED:
            return False
        if own.get("group") is not None:
            return any(self._ids.get(name) in own["group"] for name in targets)
        size = own.get("group_size") or 0
        others = {
            event["peer"]
            for event in self._by_round[round_]
            if event["outcome"] in GROUPED and event.get("group_size") == size
        }
        return bool(size > len(others - targets))


class Progress:
    """Rounds that peers applied.

    Args:
        timeline: The replicate.
        capacity: When its peers were there.
    """

    def __init__(self, timeline: Timeline, capacity: Capacity) -> None:
        local = timeline.spec.swarm.use_local_updates
        self._told = timeline.of("transition" if local else "round")
        applied = [event for event in self._told if local or timeline.applied(event)]
        self._applied = sorted(applied, key=lambda event: (event["t"], event["peer"]))
        self._groups, self._capacity = Groups(timeline), capacity
        self._apart, self._lives = fault_windows(timeline, APART), timeline.lives
        self._end = 0.0 if timeline.span is None else timeline.span[1]

    def survivors(self, strike: Strike) -> frozenset[str]:
        """Return the peers that trained then and are no targets; all that did, if all are."""
        present = self._capacity.present(strike.fired)
        return present - strike.targets or present

    def steps(self, strike: Strike) -> list[Step]:
        """Return the rounds that survivors applied after a fault, in order of time.

        A round counts as progress if the survivor's group held none of the targets. Once a target
        that was stopped or cut off is healed, every round counts. Of a fault that leaves its
        targets in the groups (effect ``none``), and where all peers are targets, a round counts
        that is after the last one that a target had reported when the fault fired.
        """
        survivors = self.survivors(strike)
        missing = strike.effect in AWAY and survivors.isdisjoint(strike.targets)
        last = max(
            (
                event["round"]
                for event in self._told
                if event["peer"] in strike.targets and event["t"] <= strike.fired
            ),
            default=0,
        )

        def counts(event: Event) -> bool:
            if not missing:
                return bool(event["round"] > last)
            if strike.effect in APART and event["t"] > (strike.healed or self._end):
                return True
            return not self._groups.held(event["peer"], event["round"], strike.targets)

        return [
            Step(event["peer"], event["round"], event["t"], counts(event))
            for event in self._applied
            if event["t"] > strike.fired and event["peer"] in survivors
        ]

    def stall(self, strike: Strike) -> Time | None:
        """Return the longest time that a survivor went without a round.

        Looked at is, of each survivor, the time from the fault until it has made progress without
        the targets and, if the fault was healed, until its first round after that. A survivor that
        another fault stopped or cut off meanwhile, or that was lost before it made progress, says
        nothing. None if none says anything; censored if one had not got there by the end.
        """
        steps = self.steps(strike)
        found = [
            self._stall(strike, [step for step in steps if step.peer == name], name)
            for name in self.survivors(strike)
        ]
        stalls = [stall for stall in found if stall is not None]
        if not stalls:
            return None
        longest = max(stall.seconds for stall in stalls)
        return Time(longest, any(stall.censored for stall in stalls))

    def _stall(self, strike: Strike, steps: list[Step], name: str) -> Time | None:
        life = self._lives[name]
        end = self._end if life.ended is None else min(life.ended, self._end)
        shown = next((step.moment for step in steps if step.counts), None)
        until = end if shown is None else max(shown, strike.healed or shown)
        moments, ended = [strike.fired], False
        for step in steps:
            moments.append(step.moment)
            if step.moment >= until:
                ended = True
                break
        if not ended:
            moments.append(max(end, moments[-1]))
        if overlap((strike.fired, moments[-1]), self._apart.get(name, ())) > 0:
            return None
        if not ended and life.end not in (None, "peer_finished"):
            return None
        gaps = [after - before for before, after in pairwise(moments)]
        longest = max(gaps)
        return Time(longest, censored=not ended and (shown is None or gaps[-1] == longest))
