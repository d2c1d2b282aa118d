"""Metrics: events in, columns out; one file for each group of columns.

:func:`rayhive.metrics.rows.replicate_row` computes the row of one replicate,
:func:`rayhive.metrics.aggregate.fold` the rows of the results table. Group modules are imported
at the first look-up of a column.
"""

from __future__ import annotations

from rayhive.registry import METRICS

METRICS.register_files("rayhive.metrics.groups")

__all__ = ["METRICS"]
