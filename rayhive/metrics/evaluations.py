"""Evaluations on the held-out split, joined over the peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rayhive.events import Event
from rayhive.metrics.timeline import Timeline, group_by


@dataclass(frozen=True)
class EvaluationPoint:
    """Evaluation of the peers after one round.

    Attributes:
        round: Number of rounds before it.
        samples: Samples that the swarm had committed by then.
        clock_s: Training clock of the last peer that evaluated [s].
        values: Metric to its mean over the peers.
        spread: Metric to the largest difference between two peers.
        peers: Number of peers that evaluated.
        final: Whether it is the evaluation after the last round.
    """

    round: int
    samples: int
    clock_s: float
    values: Mapping[str, float]
    spread: Mapping[str, float]
    peers: int
    final: bool


def evaluations(timeline: Timeline) -> tuple[EvaluationPoint, ...]:
    """Return the evaluations in the order of rounds, the final one (of all peers) last."""
    regular = [event for event in timeline.of("evaluation") if not event.get("final")]
    stayed = {item.name for item in timeline.incarnations.values() if item.end != "left"}
    final = [e for e in timeline.of("evaluation") if e.get("final") and e["peer"] in stayed]
    points = [_point(timeline, events) for events in group_by(regular, "round").values()]
    return tuple(points if not final else [*points, _point(timeline, final)])


def _point(timeline: Timeline, events: Sequence[Event]) -> EvaluationPoint:
    number = max(event["round"] for event in events)
    local = timeline.spec.swarm.use_local_updates
    metrics = set.intersection(*(set(event["values"]) for event in events))
    columns = {name: [e["values"][name] for e in events] for name in sorted(metrics)}
    return EvaluationPoint(
        round=number,
        samples=sum(event["samples"] for event in events) if local else timeline.committed(number),
        clock_s=max(timeline.clock_of(event) for event in events),
        values={name: fmean(values) for name, values in columns.items()},
        spread={name: max(values) - min(values) for name, values in columns.items()},
        peers=len({event["peer"] for event in events}),
        final=bool(events[0].get("final")),
    )
