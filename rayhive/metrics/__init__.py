"""Metrics: one file a group of columns, events in, columns out.

Nothing heavy is imported here. :func:`rayhive.metrics.rows.replicate_row` runs every group over
one replicate, :func:`rayhive.metrics.aggregate.fold` makes rows of the results table of them.
"""

from __future__ import annotations

from rayhive.registry import METRICS

METRICS.register_lazy("badput", "rayhive.metrics.badput:Badput")
METRICS.register_lazy("communication", "rayhive.metrics.communication:Communication")
METRICS.register_lazy("convergence", "rayhive.metrics.convergence:Convergence")
METRICS.register_lazy("faults", "rayhive.metrics.faults:Faults")
METRICS.register_lazy("provenance", "rayhive.metrics.provenance:Provenance")
METRICS.register_lazy("refusals", "rayhive.metrics.refusals:Refusals")
METRICS.register_lazy("throughput", "rayhive.metrics.throughput:Throughput")
METRICS.register_lazy("weights", "rayhive.metrics.weights:Weights")

__all__ = ["METRICS"]
