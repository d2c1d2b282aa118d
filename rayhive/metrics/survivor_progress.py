"""Progress of a fault's survivors: their rounds without its targets, and their longest stall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from rayhive.events import APART, GROUPED, DHTReady, PeerFinished, Round, StateRound, Transition
from rayhive.metrics.live_capacity import Capacity, fault_windows, overlap
from rayhive.metrics.stats import Time
from rayhive.timeline import FaultWindow, Timeline

#: Report of a round that a peer applied.
Step: TypeAlias = Round | Transition
#: Effects of faults that remove the targets from the survivors' groups.
AWAY = APART | {"gone"}


class SurvivorProgress:
    """Rounds that survivors applied.

    Args:
        timeline: The replicate.
        capacity: Live peers of the replicate over time.
    """

    def __init__(self, timeline: Timeline, capacity: Capacity) -> None:
        # with local updates there are no gradient rounds, and groups average parameters only
        local = timeline.spec.swarm.use_local_updates
        self._reported: Sequence[Step] = timeline.of(Transition) if local else timeline.of(Round)
        applied = [e for e in self._reported if isinstance(e, Transition) or timeline.applied(e)]
        self._applied = sorted(applied, key=lambda event: (event.t, event.peer or ""))
        self._averaged: Mapping[int, Sequence[Round | StateRound]] = (
            timeline.by_round(StateRound) if local else timeline.by_round(Round)
        )
        self._own = {(e.peer, e.round): e for events in self._averaged.values() for e in events}
        self._ids = {event.peer: event.peer_id for event in timeline.of(DHTReady)}
        self._capacity, self._apart = capacity, fault_windows(timeline, APART)
        self._incarnations = timeline.incarnations
        self._end = 0.0 if timeline.span is None else timeline.span[1]

    def survivors(self, fault: FaultWindow) -> frozenset[str]:
        """Return the peers that trained then and are no targets; if all are targets, all peers."""
        present = self._capacity.present(fault.fired)
        return present - fault.targets or present

    def rounds(self, fault: FaultWindow) -> list[tuple[Step, bool]]:
        """Return the rounds that survivors applied after a fault, and whether each is progress.

        A round counts as progress if the survivor's group contained none of the targets. Once a
        stopped or cut-off target is healed, every round counts. If the fault leaves its targets in
        the groups (effect ``none``), or all peers are targets, a round counts that is later than
        the last round which a target had reported when the fault fired. The rounds are in the order
        of time.
        """
        survivors = self.survivors(fault)
        missing = fault.effect in AWAY and survivors.isdisjoint(fault.targets)
        last = max(
            (
                event.round
                for event in self._reported
                if event.peer in fault.targets and event.t <= fault.fired
            ),
            default=0,
        )

        def counts(event: Step) -> bool:
            if not missing:
                return event.round > last
            if fault.effect in APART and event.t > (fault.healed or self._end):
                return True
            return not self._had_target(event, fault.targets)

        return [
            (event, counts(event))
            for event in self._applied
            if event.t > fault.fired and event.peer in survivors
        ]

    def _had_target(self, event: Step, targets: frozenset[str]) -> bool:
        """Return whether a peer's group of a round contained one of the targets.

        Logs of earlier versions record only the size of the group. Then a target is assumed to be
        in a group that is larger than the number of non-targets which report the same round with
        that size.
        """
        own = self._own.get((event.peer, event.round))
        if own is None or own.outcome not in GROUPED:
            return False
        if own.group is not None:
            return any(self._ids.get(name) in own.group for name in targets)
        reporting = {
            other.peer
            for other in self._averaged[event.round]
            if other.outcome in GROUPED and other.group_size == own.group_size
        }
        return (own.group_size or 0) > len(reporting - targets)

    def stall(self, fault: FaultWindow) -> Time | None:
        """Return the longest time that a survivor went without a round [s].

        The time of each survivor begins with the fault and lasts until its first progress without
        the targets and, if the fault was healed, until its first round after the heal. A survivor
        is left out if another fault stopped it or cut it off meanwhile, or if it was lost before
        its first progress. None if no survivor remains; censored if one had not reached the end of
        its time when training ended.
        """
        rounds: dict[str | None, list[tuple[float, bool]]] = defaultdict(list)
        for event, counts in self.rounds(fault):
            rounds[event.peer].append((event.t, counts))
        found = [self._stall(fault, name, rounds[name]) for name in self.survivors(fault)]
        stalls = [stall for stall in found if stall is not None]
        if not stalls:
            return None
        longest = max(stall.seconds for stall in stalls)
        return Time(longest, any(stall.censored for stall in stalls))

    def _stall(
        self, fault: FaultWindow, name: str, rounds: Sequence[tuple[float, bool]]
    ) -> Time | None:
        """Return the longest time of one survivor, from the time and kind of its rounds."""
        survivor = self._incarnations[name]
        end = self._end if survivor.ended is None else min(survivor.ended, self._end)
        shown = next((moment for moment, counts in rounds if counts), None)
        until = end if shown is None else max(shown, fault.healed or shown)
        moments, ended = [fault.fired], False
        for moment, _ in rounds:
            moments.append(moment)
            if moment >= until:
                ended = True
                break
        if not ended:
            moments.append(max(end, moments[-1]))
        if overlap((fault.fired, moments[-1]), self._apart.get(name, ())) > 0:
            return None
        if not ended and survivor.end is not None and not isinstance(survivor.end, PeerFinished):
            return None
        gaps = [after - before for before, after in pairwise(moments)]
        longest = max(gaps)
        return Time(longest, censored=not ended and (shown is None or gaps[-1] == longest))
