"""Columns that identify a replicate and its end."""

from __future__ import annotations

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.group import MetricGroup
from rayhive.timeline import Timeline


class Replicate(MetricGroup):
    """Columns of ``trials.parquet`` that identify a replicate.

    * ``trial``, ``replicate``, ``seed``, ``attempt``: from the replicate's spec.
    * ``state``, ``stop_reason``: from ``replicate_finished``. ``state`` is ``unfinished`` and
      ``stop_reason`` None if the log has no such event.
    """

    columns = in_group(
        "replicate",
        Column("trial", "Number of the trial in the study", type="count"),
        Column("replicate", "Number of the replicate in its trial and scenario", type="count"),
        Column("seed", "Seed of parameters and data order", type="count"),
        Column("attempt", "Number of earlier attempts at the replicate", type="count"),
        Column("state", "State in which the replicate ended", type="text"),
        Column("stop_reason", "Reason of the end, in words", type="text"),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        spec = timeline.spec
        return {
            "trial": spec.trial,
            "replicate": spec.replicate,
            "seed": spec.seed,
            "attempt": spec.attempt,
            "state": timeline.state,
            "stop_reason": timeline.stop_reason,
        }
