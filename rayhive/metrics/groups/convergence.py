"""Convergence: how far and how fast the loss fell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rayhive.columns import Column, Row, in_group
from rayhive.events import Evaluation, Left, PeerFinished
from rayhive.metrics.folds import Mean, RestrictedMean, Total
from rayhive.metrics.group import MetricGroup, averaged, difference, finite, measured, minimized
from rayhive.spec.pruning import PRUNED
from rayhive.timeline import Timeline


@dataclass(frozen=True)
class EvaluationPoint:
    """Evaluation of the peers after one round.

    Attributes:
        round: Number of rounds before it.
        samples: Samples that the swarm had committed by then.
        clock_s: Training clock of the last peer that evaluated [s].
        values: Metric to its mean over the peers.
    """

    round: int
    samples: int
    clock_s: float
    values: Mapping[str, float]


class Convergence(MetricGroup):
    """Columns from the held-out evaluations.

    Evaluations of different peers after the same round are one point, whose values are the means
    over the peers. The evaluations after each peer's last round are one final point.

    * ``final_loss``: ``loss`` at the last point. None if it is not finite.
    * ``loss_delta``: ``final_loss`` less that of the no-fault twin; None without a twin.
    * ``reached``: whether the target's metric is at the target or beyond it at any point. None if
      no peer became ready, because the target is a field of ``peer_ready``, and if the replicate
      was pruned.
    * ``time_to_target_s`` [s]: training clock at the first such point, not interpolated, so its
      resolution is the distance between two evaluations. None if the target was not reached: the
      time is censored, not infinite.
    * ``samples_to_target``: samples committed by the swarm at that point.
    * ``convergence_penalty``: ``samples_to_target`` less that of the twin; None without a twin, or
      if one of the two missed the target.
    * ``trained_s`` [s], ``samples``: training clock and committed samples at the end, for which a
      replicate that missed the target was observed.
    """

    columns = (
        *in_group(
            "convergence",
            minimized(
                "final_loss",
                "Held-out loss at the last evaluation",
                fold=Mean(interval=True, survivors=True),
            ),
            measured("loss_delta", "final_loss less the twin's", stage="twin"),
            minimized(
                "time_to_target_s",
                "Training time until the target was reached",
                "s",
                fold=RestrictedMean("trained_s"),
            ),
            minimized(
                "samples_to_target",
                "Committed samples until the target was reached",
                type="count",
                fold=RestrictedMean("samples"),
            ),
            Column(
                "reached", "Replicates that reached the target", type="flag", fold=Total(share=True)
            ),
            Column(
                "convergence_penalty",
                "samples_to_target less the twin's",
                stage="twin",
                # a mean over the replicates that reached the target would be no bound
                fold=Mean(interval=True, missing="none"),
            ),
        ),
        averaged("trained_s", "Training time at the end", "s"),
        averaged("samples", "Committed samples at the end", type="count"),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        points = evaluations(timeline)
        pruned = timeline.state == PRUNED  # its time is censored
        reached = (point for point in points if reaches(timeline, point))
        hit = None if pruned else next(reached, None)
        return {
            "final_loss": finite(points[-1].values.get("loss")) if points else None,
            "time_to_target_s": hit.clock_s if hit is not None else None,
            "samples_to_target": hit.samples if hit is not None else None,
            "reached": None if timeline.target is None or pruned else hit is not None,
            "trained_s": timeline.clock_s,
            "samples": timeline.committed(),
        }

    def compare(self, row: Row, twin: Row) -> Row:
        """Return the columns that compare a replicate with its twin."""
        return {
            "loss_delta": difference(row, twin, "final_loss"),
            "convergence_penalty": difference(row, twin, "samples_to_target"),
        }


def reaches(timeline: Timeline, point: EvaluationPoint) -> bool:
    """Return whether an evaluation reaches the target of the training."""
    target = timeline.target
    value = point.values.get(target["metric"]) if target is not None else None
    return target is not None and value is not None and is_at_target(target, value)


def is_at_target(target: Mapping[str, Any], value: float) -> bool:
    """Return whether a value of a target's metric is at the target or beyond it."""
    return bool(value >= target["value"] if target["mode"] == "max" else value <= target["value"])


def evaluations(timeline: Timeline) -> tuple[EvaluationPoint, ...]:
    """Return the evaluations in the order of rounds, the final one (of all peers) last."""
    return tuple(point for _, point in evaluation_points(timeline))


def evaluation_points(
    timeline: Timeline,
) -> Iterator[tuple[Sequence[Evaluation], EvaluationPoint]]:
    """Yield the evaluations of the peers, and what they make, in the order of :func:`evaluations`.

    Args:
        timeline: The replicate, which may still run.
    """
    regular = (
        [event for event in events if not event.final]
        for events in timeline.by_round(Evaluation).values()
    )
    final = list(_last_of_peers(timeline))
    if not any(event.final for event in final):
        final = []  # the last regular evaluation is that of the end
    for events in (*regular, final):
        if events:
            yield events, _point(timeline, events)


def _last_of_peers(timeline: Timeline) -> Iterator[Evaluation]:
    """Yield the evaluation of each peer after its last round, but for peers that left.

    A peer that has just evaluated when training ends does not do so again.
    """
    ends = {event.peer: event.round for event in timeline.of(PeerFinished)}
    for name, item in timeline.incarnations.items():
        own = [e for e in timeline.of(Evaluation, name) if timeline.stands(e)]
        if own and not isinstance(item.end, Left):
            last = own[-1]
            if last.final or last.round == ends.get(name):
                yield last


def _point(timeline: Timeline, events: Sequence[Evaluation]) -> EvaluationPoint:
    number = max(event.round for event in events)
    metrics = set.intersection(*(set(event.values) for event in events))
    return EvaluationPoint(
        round=number,
        samples=timeline.committed(number),
        clock_s=max(timeline.clock_of(event) for event in events),
        values={name: fmean(event.values[name] for event in events) for name in sorted(metrics)},
    )
