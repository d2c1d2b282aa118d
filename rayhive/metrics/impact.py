"""What each fault did to the swarm: when it was overcome, and when who was lost came back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from statistics import median

from rayhive.events import GROUPED, Event
from rayhive.metrics.capacity import Capacity
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
        recover_s: Seconds until throughput was back; None if that was not seen.
    """

    fault: str
    kind: str
    lives: tuple[str, ...]
    fired: float
    healed: float | None
    ok: bool | None
    detect_s: float | None
    recover_s: float | None


@dataclass(frozen=True)
class Rejoin:
    """One peer that came while the others trained.

    Attributes:
        life: Its name.
        cause: The fault that asked for it.
        spawned: When its process ran [s, Unix time].
        seconds: Until its first accepted contribution; None if there was none.
    """

    life: str
    cause: str | None
    spawned: float
    seconds: float | None


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

    * a peer that was told beforehand (``notice``), when the first such target is gone;
    * a target that was gone before all were hit and ``fault_fired`` was written, then;
    * what a peer does itself, with its first ``sabotaged``.

    Let R be the last round that a target had reported when the fault fired, and a *survivor* a
    peer that trained then and is not a target (every peer that trained then, if all are targets).

    * *detect*: from the fault to the first ``round`` that a survivor applied, or the first
      ``transition`` of a survivor, that comes after the fault and is of a round after R: a round
      that the target still took part in does not count.
    * *recover*: from the fault to the end of the first round n that comes after the fault, is
      after R, and is followed by :data:`ROUNDS` (3) rounds whose committed samples per second of
      training clock are at least :data:`SHARE` (0.9) of what the live peers should do. That is:
      peers live in these rounds, on average over time, x the samples per second and live peer
      before the first fault of the replicate (from the end of its first round to that of its last
      one before the fault; at least :data:`BASELINE_ROUNDS` rounds, or recovery can't be told).

    Live are peers that train and are neither stopped nor cut off by a fault; a peer that is
    starting is not. What is not seen before the replicate ends is None.
    """
    rounds, capacity = swarm_rounds(timeline), Capacity(timeline, from_start=True)
    fired = [(_took_effect(timeline, event), event) for event in timeline.of("fault_fired")]
    fired.sort(key=lambda item: item[0])
    baseline = _baseline(rounds, capacity, fired[0][0]) if fired else None
    steps = (*timeline.of("transition"), *filter(timeline.applied, timeline.of("round")))
    progress = sorted((e["t"], e["peer"], e["round"]) for e in steps)
    healed = {event["fault"]: event["t"] for event in timeline.of("fault_healed")}
    verified = {event["fault"]: bool(event["ok"]) for event in timeline.of("fault_verified")}
    found = []
    for moment, event in fired:
        targets = frozenset(event.get("lives") or ())
        last = _last_round(timeline, targets, moment)
        detected = _progress(progress, capacity, targets, moment, last)
        recovered = _recovered(rounds, capacity, baseline, moment, last)
        found.append(
            Impact(
                fault=event["fault"],
                kind=event["fault_kind"],
                lives=tuple(sorted(targets)),
                fired=moment,
                healed=healed.get(event["fault"]),
                ok=verified.get(event["fault"]),
                detect_s=None if detected is None else detected - moment,
                recover_s=None if recovered is None else recovered - moment,
            )
        )
    return tuple(found)


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
            found.append(Rejoin(life.name, life.cause, life.spawned, seconds))
    return tuple(sorted(found, key=lambda item: item.spawned))


def is_contribution(event: Event) -> bool:
    """Return whether samples of a peer entered an average with others in this ``round``."""
    return event["outcome"] in GROUPED and event["samples"] > 0


def _took_effect(timeline: Timeline, fired: Event) -> float:
    """Return when a fault took effect [s, Unix time]."""
    own = [e["t"] for e in timeline.of("sabotaged") if e.get("fault") == fired["fault"]]
    if own:
        return float(min(own))
    targets = frozenset(fired.get("lives") or ())
    begin, end = float(fired.get("began") or fired["t"]), float(fired["t"])
    told = {e["peer"] for e in timeline.of("notice") if e["t"] >= begin} & targets
    gone = [
        life.ended
        for life in timeline.lives.values()
        if life.name in targets and life.ended is not None and life.end != "peer_finished"
        if life.name in told or begin <= life.ended < end
    ]
    return min(gone, default=end)


def _last_round(timeline: Timeline, targets: frozenset[str], fired: float) -> int:
    reported = (e for e in timeline.of("round") if e["peer"] in targets and e["t"] <= fired)
    return max((event["round"] for event in reported), default=0)


def _progress(
    steps: Sequence[tuple[float, str, int]],
    capacity: Capacity,
    targets: frozenset[str],
    fired: float,
    last: int,
) -> float | None:
    there = capacity.present(fired)
    survivors = there - targets or there
    after = islice(steps, bisect_right(steps, fired, key=itemgetter(0)), None)
    return next((t for t, peer, round_ in after if peer in survivors and round_ > last), None)


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
    fired: float,
    last: int,
) -> float | None:
    if baseline is None:
        return None
    for index, item in enumerate(rounds[: len(rounds) - ROUNDS]):
        if item.moment > fired and item.number > last:
            rate = _per_peer(item, rounds[index + 1 : index + 1 + ROUNDS], capacity)
            if rate is not None and rate >= SHARE * baseline:
                return item.moment
    return None
