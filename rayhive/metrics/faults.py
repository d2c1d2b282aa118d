"""What broke, and how fast it healed."""

from __future__ import annotations

from typing import ClassVar

from rayhive.columns import FAULTS
from rayhive.metrics.group import MetricGroup, Row
from rayhive.metrics.timeline import Timeline


class Faults(MetricGroup):
    """Columns of the fault plan.

    No scenario breaks anything yet, so there is nothing to measure: every column is None, which
    says "not measured", where 0 would say "measured, and none".
    """

    columns: ClassVar[tuple[str, ...]] = tuple(column.name for column in FAULTS)

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        return dict.fromkeys(self.columns)
