"""Metrics of the workload, whatever it measures on the held-out split."""

from __future__ import annotations

from rayhive.columns import Column, Row, metric_names
from rayhive.metrics.folds import Mean
from rayhive.metrics.group import MetricGroup, finite
from rayhive.metrics.groups.convergence import evaluations
from rayhive.timeline import Timeline


class Logged(MetricGroup):
    """Columns ``metric.NAME``, one for each metric of the workload.

    * ``metric.NAME``: the metric at the last evaluation, as the mean over the peers; None if it is
      not finite.

    The columns are not declared here, because workloads differ in their metrics
    (:func:`rayhive.columns.metric_names`).
    """

    columns = ()

    @staticmethod
    def column(name: str) -> Column:
        """Return the declaration of a column ``metric.NAME``."""
        about = "Metric of the workload at the last evaluation"
        fold = Mean(interval=True, survivors=True)
        return Column(name, about, fold=fold, group="convergence")

    def compute(self, timeline: Timeline) -> Row:
        """Return the metrics of one replicate."""
        points = evaluations(timeline)
        values = points[-1].values if points else {}
        return {name: finite(values[metric]) for metric, name in metric_names(values).items()}
