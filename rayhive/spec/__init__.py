"""Models of a study: one YAML file, and the same fields from Python.

:mod:`~rayhive.spec.study` and the modules that it imports define the fields,
:mod:`~rayhive.spec.axes` the axes that a study searches, one file each. :func:`load_sweep` reads a
file (:mod:`~rayhive.spec.loading`), applies the rules between fields (:mod:`~rayhive.spec.rules`)
and reports every mistake at once.
"""

from __future__ import annotations

from rayhive.spec.axes import AXES, DRAW_ORDER, Axis
from rayhive.spec.axes.delay import DelayName
from rayhive.spec.configuration import Configuration, Space
from rayhive.spec.distribution import Distribution, Range
from rayhive.spec.loading import (
    Check,
    apply_overrides,
    as_problem,
    load_sweep,
    read_mapping,
    validate_sweep,
)
from rayhive.spec.model import LONGEST_S, MOST, Model
from rayhive.spec.scenario_name import is_path, scenario_label
from rayhive.spec.study import Budget, Evaluation, SweepConfig, Timeouts, WorkloadConfig
from rayhive.spec.swarm import (
    AGGREGATIONS,
    DEFAULT_RULES,
    OUTLIER_FILTERS,
    Aggregation,
    Link,
    NodeClass,
    OutlierFilterRule,
    SwarmConfig,
)

__all__ = [
    "AGGREGATIONS",
    "AXES",
    "DEFAULT_RULES",
    "DRAW_ORDER",
    "LONGEST_S",
    "MOST",
    "OUTLIER_FILTERS",
    "Aggregation",
    "Axis",
    "Budget",
    "Check",
    "Configuration",
    "DelayName",
    "Distribution",
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
    "scenario_label",
    "validate_sweep",
]
