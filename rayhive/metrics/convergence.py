"""Convergence: how far and how fast the loss fell."""

from __future__ import annotations

from typing import ClassVar

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.evaluations import EvaluationPoint, evaluations
from rayhive.metrics.folds import Mean, Total
from rayhive.metrics.group import MetricGroup, difference, finite
from rayhive.metrics.timeline import Timeline


class Convergence(MetricGroup):
    """Columns from the held-out evaluations.

    Evaluations of different peers after the same round are one point, whose values are the means
    over the peers. The evaluations after each peer's last round are one final point.

    * ``final_loss``: ``loss`` at the last point. None if it is not finite.
    * ``loss_delta``: ``final_loss`` less that of the no-fault twin; None without a twin.
    * ``reached``: whether the target's metric is at the target or beyond it at any point. None if
      no peer became ready, because the target is a field of ``peer_ready``.
    * ``time_to_target_s`` [s]: training clock at the first such point, not interpolated, so its
      resolution is the distance between two evaluations. None if the target was not reached: the
      time is censored, not infinite.
    * ``samples_to_target``: samples committed by the swarm at that point.
    * ``convergence_penalty``: ``samples_to_target`` less that of the twin; None without a twin, or
      if one of the two missed the target.
    """

    columns: ClassVar[tuple[Column, ...]] = in_group(
        "convergence",
        Column(
            "final_loss",
            "Held-out loss at the last evaluation",
            better="minimize",
            fold=Mean(interval=True, survivors=True),
        ),
        Column("loss_delta", "final_loss less the twin's", stage="twin", fold=Mean()),
        Column(
            "time_to_target_s",
            "Training time until the target was reached",
            "s",
            better="minimize",
            fold=Mean(interval=True, missing="bound"),
        ),
        Column(
            "samples_to_target",
            "Committed samples until the target was reached",
            type="count",
            better="minimize",
            fold=Mean(interval=True, missing="bound"),
        ),
        Column(
            "reached", "Replicates that reached the target", type="flag", fold=Total(share=True)
        ),
        Column(
            "convergence_penalty",
            "samples_to_target less the twin's",
            stage="twin",
            # a mean over the replicates that reached the target would be no bound
            fold=Mean(missing="none"),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        points = evaluations(timeline)
        hit = next((point for point in points if _reaches(timeline, point)), None)
        return {
            "final_loss": finite(points[-1].values.get("loss")) if points else None,
            "time_to_target_s": hit.clock_s if hit is not None else None,
            "samples_to_target": hit.samples if hit is not None else None,
            "reached": None if timeline.target is None else hit is not None,
        }

    def compare(self, row: Row, twin: Row) -> Row:
        """Return the columns that compare a replicate with its twin."""
        return {
            "loss_delta": difference(row, twin, "final_loss"),
            "convergence_penalty": difference(row, twin, "samples_to_target"),
        }


def _reaches(timeline: Timeline, point: EvaluationPoint) -> bool:
    target = timeline.target
    value = point.values.get(target["metric"]) if target is not None else None
    if target is None or value is None:
        return False
    return bool(value >= target["value"] if target["mode"] == "max" else value <= target["value"])
