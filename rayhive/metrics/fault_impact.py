"""What each fault did to the swarm: when it was overcome, and when who was lost came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rayhive.events import GROUPED, Event
from rayhive.metrics.live_capacity import Capacity
from rayhive.metrics.stats import Time
from rayhive.metrics.survivor_progress import Progress, Strike
from rayhive.metrics.timeline import Timeline

#: Rounds over which throughput is measured.
ROUNDS = 3
#: Share of the throughput that the live peers should have, from which a swarm has recovered.
SHARE = 0.9
#: Rounds that must lie before the first fault to know that throughput.
BASELINE_ROUNDS = 2


@dataclass(frozen=True)
class Impact:
    """What became of one fault that fired.

    Attributes:
        fault: Its id.
        kind: Its kind.
        lives: Names of the peers that it was about.
        fired: When it took effect [s, Unix time].
        healed: When it was taken back; None if it was not.
        ok: Whether it was proved to have taken effect; None if nobody looked.
        detect_s: Seconds to the first survivor's progress; None if that was not seen.
        stall: Longest time that a survivor went without a round; None if no survivor can tell.
        recover_s: Seconds until throughput was back; None if that was not seen.
        observed_s: Seconds from the fault to the end of training.
    """

    fault: str
    kind: str
    lives: tuple[str, ...]
    fired: float
    healed: float | None
    ok: bool | None
    detect_s: float | None
    stall: Time | None
    recover_s: float | None
    observed_s: float


@dataclass(frozen=True)
class Rejoin:
    """One peer that came while the others trained.

    Attributes:
        life: Its name.
        cause: The fault that asked for it.
        spawned: When its process ran [s, Unix time].
        seconds: Until its first accepted contribution; None if there was none.
        observed_s: Seconds from its start to its end, or to that of training.
    """

    life: str
    cause: str | None
    spawned: float
    seconds: float | None
    observed_s: float


@dataclass(frozen=True)
class SwarmRound:
    """A round as the swarm made it.

    Attributes:
        number: Its number.
        moment: When the first peer had it [s, Unix time].
        clock_s: The swarm's training clock then [s], the median over the peers.
        samples: Samples that entered it.
    """

    number: int
    moment: float
    clock_s: float
    samples: int


def swarm_rounds(timeline: Timeline) -> tuple[SwarmRound, ...]:
    """Return the rounds that were applied, in the order of time."""
    rounds = []
    for number, events in timeline.by_round("round").items():
        applied = [event for event in events if timeline.applied(event)]
        if applied:
            clocks = [timeline.clock_of(e) for e in applied if e.get("clock_s") is not None]
            rounds.append(
                SwarmRound(
                    number=number,
                    moment=min(event["t"] for event in applied),
                    clock_s=median(clocks) if clocks else 0.0,
                    samples=sum(event["samples"] for event in applied),
                )
            )
    return tuple(sorted(rounds, key=lambda item: item.moment))


def impacts(timeline: Timeline) -> tuple[Impact, ...]:
    """Measure every fault that fired, in the order of firing.

    A fault begins when it takes effect: with ``fault_fired``, or, for

    * a peer that this fault told beforehand (``notice``), when the first such target is gone;
    * a target that was gone before all were hit and ``fault_fired`` was written, then;
    * what a peer does itself, with its first ``sabotaged``.

    Survivors, and which of their rounds count as progress without the targets:
    :meth:`rayhive.metrics.survivor_progress.Progress.steps`.

    * *detect*: from the fault to the first round that counts.
    * *stall*: see :meth:`rayhive.metrics.survivor_progress.Progress.stall`.
    * *recover*: from the fault to the first report of the first round that counts and is
      followed by :data:`ROUNDS` (3) rounds whose committed samples per second of training clock
      are at least :data:`SHARE` (0.9) of what the live peers should do. That is: peers live in
      these rounds, on average over time, x the samples per second and live peer before the first
      fault of the replicate (from the end of its first round to that of its last one before the
      fault; at least :data:`BASELINE_ROUNDS` rounds, or recovery can't be told).

    Live are peers that train and are neither stopped nor cut off by a fault; a peer that is
    starting is not. What is not seen before the replicate ends is None.
    """
    rounds, capacity = swarm_rounds(timeline), Capacity(timeline, from_start=True)
    progress, end = Progress(timeline, capacity), _end(timeline)
    begins = _took_effect(timeline)
    fired = sorted(zip(begins, timeline.of("fault_fired"), strict=True), key=lambda item: item[0])
    baseline = _baseline(rounds, capacity, fired[0][0]) if fired else None
    healed = {event["fault"]: event["t"] for event in timeline.of("fault_healed")}
    verified = {event["fault"]: bool(event["ok"]) for event in timeline.of("fault_verified")}
    found = []
    for moment, event in fired:
        targets = frozenset(event.get("lives") or ())
        strike = Strike(moment, healed.get(event["fault"]), event["effect"], targets)
        reports: dict[int, float] = {}
        for step in progress.steps(strike):
            if step.counts:
                reports.setdefault(step.round, step.moment)
        recovered = _recovered(rounds, capacity, baseline, reports)
        found.append(
            Impact(
                fault=event["fault"],
                kind=event["fault_kind"],
                lives=tuple(sorted(targets)),
                fired=moment,
                healed=strike.healed,
                ok=verified.get(event["fault"]),
                detect_s=min(reports.values()) - moment if reports else None,
                stall=progress.stall(strike),
                recover_s=None if recovered is None else recovered - moment,
                observed_s=max(0.0, end - moment),
            )
        )
    return tuple(found)


def _end(timeline: Timeline) -> float:
    return 0.0 if timeline.span is None else timeline.span[1]


def rejoins(timeline: Timeline) -> tuple[Rejoin, ...]:
    """Return every peer that was spawned after training had started, in the order of time.

    Its first accepted contribution is its first ``round`` with outcome ``averaged`` or
    ``partial`` into which samples of its own went.
    """
    if timeline.span is None:
        return ()
    found = []
    rounds = timeline.by_peer("round")
    for life in timeline.lives.values():
        if life.spawned is not None and life.spawned > timeline.span[0]:
            accepted = next((e for e in rounds.get(life.name, ()) if is_contribution(e)), None)
            seconds = None if accepted is None else accepted["t"] - life.spawned
            until = _end(timeline) if life.ended is None else min(life.ended, _end(timeline))
            observed = max(0.0, until - life.spawned)
            found.append(Rejoin(life.name, life.cause, life.spawned, seconds, observed))
    return tuple(sorted(found, key=lambda item: item.spawned))


def is_contribution(event: Event) -> bool:
    """Return whether samples of a peer entered an average with others in this ``round``."""
    return event["outcome"] in GROUPED and event["samples"] > 0


def _took_effect(timeline: Timeline) -> list[float]:
    """Return when each fault took effect [s, Unix time], in the order of the log."""
    fired = timeline.of("fault_fired")
    told: dict[str, set[str]] = {event["fault"]: set() for event in fired}
    for notice in timeline.of("notice"):
        fault = _told_by(notice, fired)
        if fault in told:
            told[fault].add(notice["peer"])
    return [_begin(timeline, event, told[event["fault"]]) for event in fired]


def _told_by(notice: Event, fired: Sequence[Event]) -> str | None:
    """Return the fault that a ``notice`` belongs to.

    A notice that came as SIGTERM, or one of an older log, does not name it: then it is the last
    fault that began before and takes this peer away.
    """
    if notice.get("fault") is not None:
        return str(notice["fault"])
    earlier = [
        (_asked(event), event["fault"])
        for event in fired
        if event["effect"] == "gone"
        and notice["peer"] in (event.get("lives") or ())
        and _asked(event) <= notice["t"]
    ]
    return max(earlier)[1] if earlier else None


def _asked(fired: Event) -> float:
    return float(fired.get("began") or fired["t"])


def _begin(timeline: Timeline, fired: Event, told: set[str]) -> float:
    own = [e["t"] for e in timeline.of("sabotaged") if e.get("fault") == fired["fault"]]
    if own:
        return float(min(own))
    begin, end = _asked(fired), float(fired["t"])
    lives = [timeline.lives[name] for name in fired.get("lives") or () if name in timeline.lives]
    gone = [
        life.ended
        for life in lives
        if life.ended is not None and life.ended >= begin and life.end != "peer_finished"
        if life.name in told or life.ended < end
    ]
    return min(gone, default=end)


def _baseline(rounds: Sequence[SwarmRound], capacity: Capacity, fault: float) -> float | None:
    """Return samples per second of training clock and live peer before the first fault."""
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


def _recovered(
    rounds: Sequence[SwarmRound],
    capacity: Capacity,
    baseline: float | None,
    reports: Mapping[int, float],
) -> float | None:
    if baseline is None:
        return None
    for index, item in enumerate(rounds[: len(rounds) - ROUNDS]):
        if item.number in reports:
            rate = _per_peer(item, rounds[index + 1 : index + 1 + ROUNDS], capacity)
            if rate is not None and rate >= SHARE * baseline:
                return reports[item.number]
    return None
