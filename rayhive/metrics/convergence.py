"""How far and how fast the loss fell."""

from __future__ import annotations

from typing import ClassVar

from rayhive.metrics.group import MetricGroup, Row, finite
from rayhive.metrics.timeline import EvaluationPoint, Timeline


class Convergence(MetricGroup):
    """Columns from the held-out evaluations.

    Peers that evaluate after the same round make one point; its values are their means. The
    evaluations after each peer's last round make one final point.

    * ``final_loss``: ``loss`` at the last point. None if it is not finite.
    * ``loss_delta``: ``final_loss`` less that of the no-fault twin; None without a twin.
    * ``reached``: whether the target's metric is at the target or beyond it at any point. None
      where no peer was ever ready to say what the target is.
    * ``time_to_target_s`` [s]: training clock at the first such point, not interpolated: its
      resolution is the distance between two evaluations. None if the target was not reached,
      which censors the time; it does not make it infinite.
    * ``samples_to_target``: samples committed by the swarm at that point.
    * ``convergence_penalty``: ``samples_to_target`` less that of the twin; None without a twin, or
      if one of the two missed the target.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "final_loss",
        "loss_delta",
        "time_to_target_s",
        "samples_to_target",
        "reached",
        "convergence_penalty",
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        points = timeline.evaluations
        hit = next((point for point in points if _reaches(timeline, point)), None)
        return {
            "final_loss": finite(points[-1].values.get("loss")) if points else None,
            "loss_delta": None,
            "time_to_target_s": hit.clock_s if hit is not None else None,
            "samples_to_target": hit.samples if hit is not None else None,
            "reached": None if timeline.target is None else hit is not None,
            "convergence_penalty": None,
        }


def _reaches(timeline: Timeline, point: EvaluationPoint) -> bool:
    target = timeline.target
    value = point.values.get(target["metric"]) if target is not None else None
    if target is None or value is None:
        return False
    return bool(value >= target["value"] if target["mode"] == "max" else value <= target["value"])
