"""Progress of a fault's survivors: their rounds without its targets, and their longest stall."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from rayhive.events import APART, GROUPED, Event
from rayhive.metrics.live_capacity import Capacity, fault_windows, overlap
from rayhive.metrics.stats import Time
from rayhive.metrics.timeline import Timeline

#: Effects of faults that remove the targets from the survivors' groups.
AWAY = APART | {"gone"}


@dataclass(frozen=True)
class ActiveFault:
    """A fault from the view of its survivors.

    Attributes:
        fired: Time at which it took effect [s, Unix time].
        healed: Time at which it was healed; None if it was not.
        effect: Effect of its kind, one of :data:`rayhive.faults.kind.Effect`.
        targets: Names of the target peers.
    """

    fired: float
    healed: float | None
    effect: str
    targets: frozenset[str]


@dataclass(frozen=True)
class AppliedRound:
    """Round that a survivor applied after a fault.

    Attributes:
        peer: Name of the survivor.
        round: Number of the round.
        moment: Time of its report [s, Unix time].
        counts: Whether it is progress without the targets.
    """

    peer: str
    round: int
    moment: float
    counts: bool


class GroupMembership:
    """Members of every averaging group, as the members recorded them.

    Args:
        timeline: The replicate.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._ids = {event["peer"]: event.get("peer_id") for event in timeline.of("dht_ready")}
        # with local updates, groups form only to average parameters
        kind = "state_round" if timeline.spec.swarm.use_local_updates else "round"
        self._by_round = timeline.by_round(kind)
        self._own = {(event["peer"], event["round"]): event for event in timeline.of(kind)}

    def contains(self, peer: str, round_: int, targets: frozenset[str]) -> bool:
        """Return whether a peer's group of a round contained one of the targets.

        Logs of earlier versions record only the size of the group. Then a target is assumed to be
        in a group that is larger than the number of non-targets which report the same round with
        that size.
        """
        own = self._own.get((peer, round_))
        if own is None or own["outcome"] not in GROUPED:
            return False
        if own.get("group") is not None:
            return any(self._ids.get(name) in own["group"] for name in targets)
        size = own.get("group_size") or 0
        reporting = {
            event["peer"]
            for event in self._by_round[round_]
            if event["outcome"] in GROUPED and event.get("group_size") == size
        }
        return bool(size > len(reporting - targets))


class SurvivorProgress:
    """Rounds that survivors applied.

    Args:
        timeline: The replicate.
        capacity: Live peers of the replicate over time.
    """

    def __init__(self, timeline: Timeline, capacity: Capacity) -> None:
        local = timeline.spec.swarm.use_local_updates
        self._reported = timeline.of("transition" if local else "round")
        applied = [event for event in self._reported if local or timeline.applied(event)]
        self._applied = sorted(applied, key=lambda event: (event["t"], event["peer"]))
        self._groups, self._capacity = GroupMembership(timeline), capacity
        self._apart = fault_windows(timeline, APART)
        self._incarnations = timeline.incarnations
        self._end = 0.0 if timeline.span is None else timeline.span[1]

    def survivors(self, fault: ActiveFault) -> frozenset[str]:
        """Return the peers that trained then and are no targets; if all are targets, all peers."""
        present = self._capacity.present(fault.fired)
        return present - fault.targets or present

    def rounds(self, fault: ActiveFault) -> list[AppliedRound]:
        """Return the rounds that survivors applied after a fault, in order of time.

        A round counts as progress if the survivor's group contained none of the targets. Once a
        stopped or cut-off target is healed, every round counts. If the fault leaves its targets in
        the groups (effect ``none``), or all peers are targets, a round counts that is later than
        the last round which a target had reported when the fault fired.
        """
        survivors = self.survivors(fault)
        missing = fault.effect in AWAY and survivors.isdisjoint(fault.targets)
        last = max(
            (
                event["round"]
                for event in self._reported
                if event["peer"] in fault.targets and event["t"] <= fault.fired
            ),
            default=0,
        )

        def counts(event: Event) -> bool:
            if not missing:
                return bool(event["round"] > last)
            if fault.effect in APART and event["t"] > (fault.healed or self._end):
                return True
            return not self._groups.contains(event["peer"], event["round"], fault.targets)

        return [
            AppliedRound(event["peer"], event["round"], event["t"], counts(event))
            for event in self._applied
            if event["t"] > fault.fired and event["peer"] in survivors
        ]

    def stall(self, fault: ActiveFault) -> Time | None:
        """Return the longest time that a survivor went without a round [s].

        The time of each survivor begins with the fault and lasts until its first progress without
        the targets and, if the fault was healed, until its first round after the heal. A survivor
        is left out if another fault stopped it or cut it off meanwhile, or if it was lost before
        its first progress. None if no survivor remains; censored if one had not reached the end of
        its time when training ended.
        """
        rounds = self.rounds(fault)
        found = [
            self._stall(fault, [item for item in rounds if item.peer == name], name)
            for name in self.survivors(fault)
        ]
        stalls = [stall for stall in found if stall is not None]
        if not stalls:
            return None
        longest = max(stall.seconds for stall in stalls)
        return Time(longest, any(stall.censored for stall in stalls))

    def _stall(self, fault: ActiveFault, rounds: list[AppliedRound], name: str) -> Time | None:
        survivor = self._incarnations[name]
        end = self._end if survivor.ended is None else min(survivor.ended, self._end)
        shown = next((item.moment for item in rounds if item.counts), None)
        until = end if shown is None else max(shown, fault.healed or shown)
        moments, ended = [fault.fired], False
        for item in rounds:
            moments.append(item.moment)
            if item.moment >= until:
                ended = True
                break
        if not ended:
            moments.append(max(end, moments[-1]))
        if overlap((fault.fired, moments[-1]), self._apart.get(name, ())) > 0:
            return None
        if not ended and survivor.end not in (None, "peer_finished"):
            return None
        gaps = [after - before for before, after in pairwise(moments)]
        longest = max(gaps)
        return Time(longest, censored=not ended and (shown is None or gaps[-1] == longest))
