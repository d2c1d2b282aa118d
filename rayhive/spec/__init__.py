"""Models of a study: one YAML file, and the same fields from Python.

:mod:`~rayhive.spec.study` and the modules that it imports define the fields,
:mod:`~rayhive.spec.axes` the axes that a study searches, one file each. :func:`load_sweep` reads a
file (:mod:`~rayhive.spec.yaml_data`), builds the study (:mod:`~rayhive.spec.loading`), applies the
rules between fields (:mod:`~rayhive.spec.rules`) and reports every mistake at once.
"""

from rayhive.spec.axes import AXES, Axis
from rayhive.spec.axes.base import Range
from rayhive.spec.configuration import Configuration, Space
from rayhive.spec.loading import load_sweep, validate_sweep
from rayhive.spec.model import Model
from rayhive.spec.study import (
    Budget,
    Evaluation,
    SamplerName,
    SweepConfig,
    Timeouts,
    WorkloadConfig,
)
from rayhive.spec.swarm import (
    BLOCKWISE,
    Aggregation,
    Link,
    NodeClass,
    OutlierFilterRule,
    SwarmConfig,
)

__all__ = [
    "AXES",
    "BLOCKWISE",
    "Aggregation",
    "Axis",
    "Budget",
    "Configuration",
    "Evaluation",
    "Link",
    "Model",
    "NodeClass",
    "OutlierFilterRule",
    "Range",
    "SamplerName",
    "Space",
    "SwarmConfig",
    "SweepConfig",
    "Timeouts",
    "WorkloadConfig",
    "load_sweep",
    "validate_sweep",
]
