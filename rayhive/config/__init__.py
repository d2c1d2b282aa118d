"""A study as the user writes it: one YAML file, one model, the same fields from Python.

:mod:`~rayhive.config.models` says what there is, :mod:`~rayhive.config.reading` turns a file into
it, and :mod:`rayhive.checks` decides what may be combined with what. :func:`load_sweep` runs all
three and reports every mistake at once.
"""

from __future__ import annotations

from rayhive.config.models import (
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
from rayhive.config.reading import (
    Check,
    apply_overrides,
    as_problem,
    load_sweep,
    read_mapping,
    validate_sweep,
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
