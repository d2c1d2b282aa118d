"""Clocks of the nodes: how much they were corrected, and how sure that is."""

from __future__ import annotations

import math

from rayhive.columns import Column, Row, in_group
from rayhive.metrics.clocks import clocks_of
from rayhive.metrics.folds import Reduced
from rayhive.metrics.group import MetricGroup
from rayhive.timeline import Timeline


class NodeClocks(MetricGroup):
    """Columns of the correction that put all times on the supervisor's clock.

    * ``clock_correction_s`` [s]: the largest correction of a node's clock, without its sign; 0 if
      all clocks may be equal (:func:`rayhive.metrics.clocks.clocks_of`).
    * ``clock_uncertainty_s`` [s]: the largest error of a node's corrected clock that the order of
      events allows, over the nodes whose peers trained. A difference of times that a node and the
      supervisor stamped is wrong by no more than this, one between two nodes by no more than twice
      as much. 0 if all processes share the clock of one kernel; None if there is no bound.

    Both are None if the log does not name the nodes of the peers.
    """

    columns = in_group(
        "faults",
        Column(
            "clock_correction_s", "Largest correction of a node's clock", "s", fold=Reduced(max)
        ),
        Column(
            "clock_uncertainty_s",
            "Largest possible error of a corrected clock",
            "s",
            fold=Reduced(max, whole=True),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        clocks = clocks_of(timeline) if timeline.clocks is None else timeline.clocks
        if not clocks.offsets:
            return dict.fromkeys(self.names("replicate"))
        used = {clocks.nodes[name] for name in timeline.trained if name in clocks.nodes}
        error = max((clocks.offsets[node].error_s for node in used), default=math.inf)
        return {
            "clock_correction_s": max(abs(each.seconds) for each in clocks.offsets.values()),
            "clock_uncertainty_s": error if math.isfinite(error) else None,
        }
