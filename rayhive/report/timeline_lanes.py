"""Data of the picture of a replicate: its losses, and the activities of each replica over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from rayhive.events import Evaluation, Event, Round, Transition
from rayhive.timeline import Incarnation, Timeline

E = TypeVar("E", bound=Event)

#: Activities of a replica, and outcomes of its rounds.
ACTIVITIES = (
    "averaged",
    "partial",
    "alone",
    "local",
    "skipped",
    "step",
    "starting",
    "evaluating",
)


@dataclass(frozen=True)
class Bar:
    """Interval of a replica's time.

    Attributes:
        replica: Name of the replica.
        activity: One of :data:`ACTIVITIES`.
        begin: Begin [s since training started].
        seconds: Duration [s].
        text: Text under the mouse pointer.
    """

    replica: str
    activity: str
    begin: float
    seconds: float
    text: str


def loss_points(timeline: Timeline) -> dict[str, list[tuple[float, float]]]:
    """Return points (seconds, loss) of the training batches by round, and of the evaluations."""
    rounds, evaluations = timeline.by_round(Round), timeline.by_round(Evaluation)
    return {
        "training batches": _means(timeline, rounds, lambda event: event.loss),
        "held out": _means(timeline, evaluations, lambda event: event.values.get("loss")),
    }


def _means(
    timeline: Timeline, rounds: Mapping[int, Sequence[E]], loss: Callable[[E], float | None]
) -> list[tuple[float, float]]:
    """Return the time of the last report [s] and the mean loss of each round with a finite one."""
    assert timeline.span is not None
    points = []
    for events in rounds.values():
        known = [value for event in events if (value := loss(event)) is not None]
        if known and math.isfinite(mean := fmean(known)):
            ended = max(event.t for event in events)
            points.append((ended - timeline.span[0], mean))
    return sorted(points)


def lanes(timeline: Timeline) -> list[Bar]:
    """Return the activities of every replica. Gaps are times without a process."""
    return [bar for item in timeline.incarnations.values() for bar in _lane(timeline, item)]


def _lane(timeline: Timeline, incarnation: Incarnation) -> Iterator[Bar]:
    assert timeline.span is not None
    began = timeline.span[0]
    name, replica, spawned = incarnation.name, incarnation.replica, incarnation.spawned
    rounds = {event.round: event for event in timeline.of(Round, name)}
    started = incarnation.ended if incarnation.started is None else incarnation.started
    if spawned is not None and started is not None and started > began:
        begin = max(spawned, began)
        yield Bar(replica, "starting", begin - began, started - begin, f"{name} starts")
    at, clock = incarnation.started, 0.0
    for event in timeline.of(Transition, name):
        if at is None or event.clock_s is None:
            continue
        round_ = rounds.get(event.round)
        paused = max(0.0, event.t - at - (event.clock_s - clock))
        if paused > 0.01:  # evaluation directly follows the previous transition
            yield Bar(replica, "evaluating", at - began, paused, f"{name} evaluates")
        outcome = "step" if round_ is None else round_.outcome
        text = f"{name}, round {event.round}: {outcome}"
        if round_ is not None:
            text += f", {round_.samples} samples, group of {round_.group_size or 1}"
        yield Bar(replica, outcome, at + paused - began, event.t - at - paused, text)
        at, clock = event.t, event.clock_s
