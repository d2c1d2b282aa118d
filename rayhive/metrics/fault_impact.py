"""Impact of each fault on the swarm: detection, stall and recovery, and the peers that rejoin."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from rayhive.events import (
    APPLIED,
    GROUPED,
    FaultActed,
    FaultFired,
    FaultVerified,
    Notice,
    PeerFinished,
    RolledBack,
    Round,
)
from rayhive.metrics.live_capacity import Capacity
from rayhive.metrics.stats import Time
from rayhive.metrics.survivor_progress import SurvivorProgress
from rayhive.timeline import FaultWindow, Timeline, group_by

#: Rounds over which throughput is measured.
ROUNDS = 3
#: Share of the live peers' expected throughput from which a swarm has recovered.
SHARE = 0.9
#: Rounds before the first fault that are needed to know the expected throughput.
BASELINE_ROUNDS = 2


@dataclass(frozen=True)
class FaultImpact(FaultWindow):
    """A fault that fired, with its impact; ``fired`` is the time at which it took effect.

    Attributes:
        ok: Whether it was proved to have taken effect; None without a ``fault_verified`` event.
        detect_s: Seconds to the first survivor's progress; None if that was not seen.
        stall: Longest time that a survivor went without a round; None if no survivor counts.
        recover_s: Seconds until throughput was back; None if that was not seen, or is not known.
        recovery_known: Whether the expected throughput is known, and with it recovery.
        observed_s: Seconds from the fault to the end of training.
    """

    ok: bool | None
    detect_s: float | None
    stall: Time | None
    recover_s: float | None
    recovery_known: bool
    observed_s: float


@dataclass(frozen=True)
class Rejoin:
    """Peer that joined while other peers trained.

    Attributes:
        peer: Name of the peer.
        cause: Id of the fault that asked for it; None if no fault did.
        spawned: Start of its process [s, Unix time].
        seconds: Seconds until its first accepted contribution; None if it made none.
        observed_s: Seconds from its start to its end, or to the end of training.
    """

    peer: str
    cause: str | None
    spawned: float
    seconds: float | None
    observed_s: float


@dataclass(frozen=True)
class SwarmRound:
    """Applied round of the whole swarm.

    Attributes:
        number: Number of the round.
        moment: Time of the first peer's report [s, Unix time].
        clock_s: Training clock of the swarm at the round [s], the median over the peers.
        samples: Samples that entered the round.
    """

    number: int
    moment: float
    clock_s: float
    samples: int


def swarm_rounds(timeline: Timeline) -> tuple[SwarmRound, ...]:
    """Return the applied rounds in the order of time."""
    return tuple(_swarm_rounds(filter(timeline.applied, timeline.of(Round)), timeline))


def _swarm_rounds(
    applied: Iterable[Round], timeline: Timeline, capacity: Capacity | None = None
) -> list[SwarmRound]:
    """Return the rounds of some reports in the order of time.

    Args:
        applied: The reports.
        timeline: The replicate.
        capacity: Live peers over time, to leave out the samples of peers that a fault has stopped
            or cut off; None counts all.
    """
    rounds = []
    for number, events in group_by(applied, lambda event: event.round).items():
        clocks = [timeline.clock_of(event) for event in events if event.clock_s is not None]
        rounds.append(
            SwarmRound(
                number=number,
                moment=min(event.t for event in events),
                clock_s=median(clocks) if clocks else 0.0,
                samples=sum(
                    event.samples
                    for event in events
                    if capacity is None or not capacity.is_away(event.peer or "", event.t)
                ),
            )
        )
    return sorted(rounds, key=lambda item: item.moment)


def impacts(timeline: Timeline) -> tuple[FaultImpact, ...]:
    """Return the impact of every fault that fired, in the order of firing.

    A fault begins when it takes effect, with ``fault_fired``. There are three exceptions:

    * The fault gave notice to targets (``notice``): it begins when the first of these is gone.
    * A target was gone before all were hit and ``fault_fired`` was written: it begins then.
    * A peer acts on itself: it begins with the first ``sabotaged`` event.

    :meth:`rayhive.metrics.survivor_progress.SurvivorProgress.progress` defines the survivors, and
    the rounds that count as progress without the targets.

    * *detect*: from the fault to the first round that counts.
    * *stall*: see :meth:`rayhive.metrics.survivor_progress.SurvivorProgress.stall`.
    * *recover*: from the fault to the first report of a round that counts and is followed by
      :data:`ROUNDS` (3) rounds with at least :data:`SHARE` (0.9) of the expected throughput, in
      committed samples of live peers per second of training clock. The expected throughput is
      the mean number of live peers in these rounds x the throughput per live peer before the first
      fault of the replicate. That baseline runs from the end of the first round to the end of the
      last round before the fault. With fewer than :data:`BASELINE_ROUNDS` rounds, recovery is
      unknown.

    A live peer trains and is neither stopped nor cut off by a fault; a starting peer is not live.
    Times that do not end before the replicate does are None. A time that ended before a return to
    a checkpoint is that of the rounds of then, although these were undone later.
    """
    found = _impacts(timeline)
    for moment in reversed(_returns(timeline)):
        before = Timeline(timeline.spec, [e for e in timeline.events if e.t < moment])
        known = {impact.fault: impact for impact in _impacts(before)}
        found = [_earlier(impact, known.get(impact.fault)) for impact in found]
    return tuple(found)


def _returns(timeline: Timeline) -> list[float]:
    """Return when the peers went back to a checkpoint, once for each time [s, Unix time]."""
    moments, together = list[float](), False
    for event in timeline.events:
        if isinstance(event, RolledBack):
            moments += [] if together else [event.t]
            together = True
        elif isinstance(event, Round):
            together = False
    return moments


def _earlier(impact: FaultImpact, before: FaultImpact | None) -> FaultImpact:
    """Return the impact of a fault with the times that had ended before a return."""
    if before is None:
        return impact
    ended = before.stall is not None and not before.stall.censored
    return replace(
        impact,
        detect_s=impact.detect_s if before.detect_s is None else before.detect_s,
        stall=before.stall if ended else impact.stall,
        recover_s=impact.recover_s if before.recover_s is None else before.recover_s,
    )


def _impacts(timeline: Timeline) -> list[FaultImpact]:
    """Return the impact of every fault by the rounds that were not undone."""
    applied = filter(timeline.applied, timeline.of(Round))
    capacity = Capacity(timeline, from_start=True)
    rounds = _swarm_rounds(applied, timeline, capacity)
    progress = SurvivorProgress(timeline, capacity)
    end = 0.0 if timeline.span is None else timeline.span[1]
    faults = sorted(faults_in_effect(timeline), key=lambda fault: fault.fired)
    baseline = _baseline(timeline, capacity, faults[0].fired) if faults else None
    recovery = _Recovery(rounds, capacity, baseline, progress)
    verified = {event.fault: event.ok for event in timeline.of(FaultVerified)}
    found = []
    for fault in faults:
        moment = fault.fired
        detected, recovered = progress.first(fault), recovery.of(fault)
        found.append(
            FaultImpact(
                **vars(fault),
                ok=verified.get(fault.fault),
                detect_s=None if detected is None else detected - moment,
                stall=progress.stall(fault),
                recover_s=None if recovered is None else recovered - moment,
                recovery_known=baseline is not None,
                observed_s=max(0.0, end - moment),
            )
        )
    return found


def rejoins(timeline: Timeline) -> tuple[Rejoin, ...]:
    """Return every peer that was spawned after training had started, in the order of time.

    The first accepted contribution is the first ``round`` with outcome ``averaged`` or ``partial``
    that contains samples of the peer.
    """
    if timeline.span is None:
        return ()
    found, (begin, end) = [], timeline.span
    for peer in timeline.incarnations.values():
        if peer.spawned is not None and peer.spawned > begin:
            averaged = (e for e in timeline.of(Round, peer.name) if e.outcome in GROUPED)
            accepted = next((event.t for event in averaged if event.samples > 0), None)
            seconds = None if accepted is None else accepted - peer.spawned
            until = end if peer.ended is None else min(peer.ended, end)
            observed = max(0.0, until - peer.spawned)
            found.append(Rejoin(peer.name, peer.cause, peer.spawned, seconds, observed))
    return tuple(sorted(found, key=lambda item: item.spawned))


def faults_in_effect(timeline: Timeline) -> list[FaultWindow]:
    """Return the faults from the time at which each took effect, in the order of the log."""
    fired = timeline.of(FaultFired)
    removing: dict[str | None, list[tuple[float, str]]] = defaultdict(list)
    for event in fired:
        for name in (event.lives or ()) if event.effect == "gone" else ():
            removing[name].append((_began(event), event.fault))
    noticed: dict[str | None, set[str | None]] = defaultdict(set)
    for notice in timeline.of(Notice):
        noticed[_fault_of(notice, removing)].add(notice.peer)
    acted: dict[str, list[float]] = defaultdict(list)
    for act in timeline.of(FaultActed):
        acted[act.fault].append(act.t)
    return [
        replace(
            fault,
            fired=_begin(timeline, event, noticed[event.fault], acted.get(event.fault, ())),
        )
        for fault, event in zip(timeline.faults, fired, strict=True)
    ]


def _fault_of(
    notice: Notice, removing: Mapping[str | None, Sequence[tuple[float, str]]]
) -> str | None:
    """Return the fault that a ``notice`` belongs to.

    A notice by SIGTERM, and a notice in a log of an earlier version, do not name the fault. It is
    the last fault that began before the notice and removes this peer. A real notice belongs to
    none.

    Args:
        notice: The notice.
        removing: Peer -> begin and id of each fault that removes it.
    """
    if notice.fault is not None or notice.source is not None:
        return notice.fault
    earlier = [item for item in removing.get(notice.peer, ()) if item[0] <= notice.t]
    return max(earlier)[1] if earlier else None


def _began(fired: FaultFired) -> float:
    return fired.began or fired.t


def _begin(
    timeline: Timeline, fired: FaultFired, noticed: Set[str | None], acted: Sequence[float]
) -> float:
    if acted:
        return min(acted)
    begin, end = _began(fired), fired.t
    known = timeline.incarnations
    targets = [known[name] for name in fired.lives or () if name in known]
    gone = [
        peer.end.t
        for peer in targets
        if peer.end is not None and peer.end.t >= begin and not isinstance(peer.end, PeerFinished)
        if peer.name in noticed or peer.end.t < end
    ]
    return min(gone, default=end)


def _baseline(timeline: Timeline, capacity: Capacity, fault: float) -> float | None:
    """Return samples per second of training clock and live peer before the first fault.

    Rounds that a later return to a checkpoint undid count: their throughput was there.
    """
    reports = timeline.of(Round)
    early = (event for event in reports if event.t <= fault and event.outcome in APPLIED)
    undone = [event for event in early if not timeline.stands(event)]
    numbers = {event.round for event in undone}
    later = (e for e in reports if timeline.applied(e) and e.round not in numbers)
    rounds = _swarm_rounds([*undone, *later], timeline)
    before = [item for item in rounds if item.moment <= fault]
    if len(before) <= BASELINE_ROUNDS:
        return None
    return _per_peer(before[0], before[1:], capacity)


def _per_peer(begin: SwarmRound, rounds: Sequence[SwarmRound], capacity: Capacity) -> float | None:
    wall, clock = rounds[-1].moment - begin.moment, rounds[-1].clock_s - begin.clock_s
    peers = capacity.peer_seconds(begin.moment, rounds[-1].moment)
    if wall <= 0 or clock <= 0 or peers <= 0:
        return None
    return sum(item.samples for item in rounds) / (clock * peers / wall)


class _Recovery:
    """Recovery of the throughput after a fault; the rate after each round is computed once.

    Args:
        rounds: Applied rounds in the order of time.
        capacity: Live peers over time.
        baseline: Samples per second and live peer before the first fault; None if unknown.
        progress: Progress of the survivors.
    """

    def __init__(
        self,
        rounds: Sequence[SwarmRound],
        capacity: Capacity,
        baseline: float | None,
        progress: SurvivorProgress,
    ) -> None:
        self._progress = progress
        self._full: list[int] = []  # rounds with reports that are followed by full throughput
        for index in range(len(rounds) - ROUNDS if baseline is not None else 0):
            rate = _per_peer(rounds[index], rounds[index + 1 : index + 1 + ROUNDS], capacity)
            if rate is not None and baseline is not None and rate >= SHARE * baseline:
                self._full.append(rounds[index].number)
        self._full = [number for number in self._full if progress.reports(number)]
        reports = [progress.reports(number) for number in self._full]
        self._latest = list(accumulate((steps[-1].t for steps in reports), max))
        self._earliest = list(accumulate((steps[0].t for steps in reversed(reports)), min))[::-1]

    def of(self, fault: FaultWindow) -> float | None:
        """Return the time of the first report of the round from which the swarm recovered."""
        counts, last = self._progress.progress(fault), self._progress.last(fault)
        for at in range(bisect_right(self._latest, fault.fired), len(self._full)):
            if self._earliest[at] > last:
                break  # only peers that joined later report the remaining rounds
            steps = self._progress.reports(self._full[at])
            moment = next((event.t for event in steps if counts(event)), None)
            if moment is not None:
                return moment
        return None
