"""Metrics: events in, columns out; one file for each group of columns.

:func:`rayhive.metrics.rows.replicate_row` computes the row of one replicate,
:func:`rayhive.metrics.aggregate.fold` the rows of the results table. Group modules are imported
at the first look-up of a column.
"""

from __future__ import annotations

from rayhive.registry import METRICS

METRICS.register_lazy("aggregate", "rayhive.metrics.aggregate:Replication")
METRICS.register_lazy("badput", "rayhive.metrics.badput:Badput")
METRICS.register_lazy("communication", "rayhive.metrics.communication:Communication")
METRICS.register_lazy("convergence", "rayhive.metrics.convergence:Convergence")
METRICS.register_lazy("faults", "rayhive.metrics.faults:Faults")
METRICS.register_lazy("pareto", "rayhive.metrics.pareto:Pareto")
METRICS.register_lazy("provenance", "rayhive.metrics.provenance:Provenance")
METRICS.register_lazy("refusals", "rayhive.metrics.refusals:Refusals")
METRICS.register_lazy("replicate", "rayhive.metrics.replicate:ReplicateColumns")
METRICS.register_lazy("robustness", "rayhive.metrics.robustness:Robustness")
METRICS.register_lazy("settings", "rayhive.metrics.settings:Settings")
METRICS.register_lazy("throughput", "rayhive.metrics.throughput:Throughput")
METRICS.register_lazy("weights", "rayhive.metrics.weights:Weights")

__all__ = ["METRICS"]
