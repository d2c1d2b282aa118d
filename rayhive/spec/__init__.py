"""A study as the user writes it: one YAML file, one model, the same fields from Python.

:mod:`~rayhive.spec.study` says what there is, :mod:`~rayhive.spec.loading` turns a file into
it, and :mod:`rayhive.spec.rules` decides what may be combined with what. :func:`load_sweep` runs
all three and reports every mistake at once.
"""

from __future__ import annotations

from rayhive.spec.loading import (
    Check,
    apply_overrides,
    as_problem,
    load_sweep,
    read_mapping,
    validate_sweep,
)
from rayhive.spec.study import (
    AGGREGATIONS,
    DEFAULT_MIN_COMPRESSION_RATIO,
    DEFAULT_RULES,
    DEFAULT_THRESHOLD,
    DELAYS,
    LONGEST_S,
    MOST,
    OUTLIER_FILTERS,
    Aggregation,
    Axis,
    Budget,
    Configuration,
    Delay,
    Evaluation,
    Link,
    Model,
    NodeClass,
    OutlierFilterRule,
    Range,
    Space,
    SwarmConfig,
    SweepConfig,
    Timeouts,
    WorkloadConfig,
    is_path,
)

__all__ = [
    "AGGREGATIONS",
    "DEFAULT_MIN_COMPRESSION_RATIO",
    "DEFAULT_RULES",
    "DEFAULT_THRESHOLD",
    "DELAYS",
    "LONGEST_S",
    "MOST",
    "OUTLIER_FILTERS",
    "Aggregation",
    "Axis",
    "Budget",
    "Check",
    "Configuration",
    "Delay",
    "Evaluation",
    "Link",
    "Model",
    "NodeClass",
    "OutlierFilterRule",
    "Range",
    "Space",
    "SwarmConfig",
    "SweepConfig",
    "Timeouts",
    "WorkloadConfig",
    "apply_overrides",
    "as_problem",
    "is_path",
    "load_sweep",
    "read_mapping",
    "validate_sweep",
]
