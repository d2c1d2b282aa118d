"""Declarations of the results' columns, and lookups over all of them.

A column is declared once, in the metric group that computes it (:mod:`rayhive.metrics`). Data
frames, aggregation, tables, ``--sort``, ``--by`` and a study's objectives are derived from the
declarations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from rayhive.registry import METRICS

Direction = Literal["minimize", "maximize"]
#: ``count`` is a nullable integer, ``flag`` a nullable boolean.
ColumnType = Literal["text", "count", "float", "flag"]
#: Stage at which a column gets its value: from one replicate's events; from a replicate and its
#: no-fault twin; when replicates are folded into a row; or from all folded rows of a run.
Stage = Literal["replicate", "twin", "fold", "run"]

#: Value of a cell. None means "not known" or "does not apply", never zero.
Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Value]

#: Ends of the names of the columns with the bounds of an interval.
BOUNDS = ("_low", "_high")

#: Begin of the names of columns that hold a metric of the workload, for example
#: ``metric.accuracy``. Which ones there are depends on the workload.
METRIC = "metric."
#: No column: that of the loss is ``final_loss``.
LOSS = f"{METRIC}loss"

#: Groups of columns in the order of the table. Columns of group ``export`` are in data frames, CSV
#: and JSON only; those of group ``replicate`` identify a replicate.
GROUPS = (
    "replicate",
    "configuration",
    "replication",
    "convergence",
    "throughput",
    "communication",
    "faults",
    "time",
    "robustness",
    "provenance",
    "export",
)


@dataclass(frozen=True)
class Replicates:
    """Replicates that make one row of the results table.

    Attributes:
        ran: Rows of all replicates, including the failed and the lost ones.
        finished: Rows of those that completed or were ended by the time limit.
    """

    ran: Sequence[Row]
    finished: Sequence[Row]


class FoldedRow(dict[str, Value]):
    """Row of the results table, with the replicates that it was folded from.

    Attributes:
        replicates: The replicates.
    """

    def __init__(self, replicates: Replicates) -> None:
        super().__init__()
        self.replicates = replicates


class Fold(ABC):
    """Rule by which the values of several replicates become one value.

    Attributes:
        interval: Whether ``NAME_low`` and ``NAME_high`` bound a 95 % interval.
        log: Whether the interval is one on a log scale, so that the value is not in its middle.
        type: Type of the folded value; None if it is that of the replicates' values.
    """

    interval: bool = False
    log: bool = False
    type: ColumnType | None = None

    @abstractmethod
    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the folded value under the column's name, and its bounds."""


@dataclass(frozen=True)
class Column:
    """A column of the results.

    Attributes:
        name: Key in data frames, JSON and ``--sort``.
        about: Definition in one sentence, without the full stop.
        unit: Unit that the header shows; empty for counts, ratios and names.
        type: Type of its values in data frames.
        better: Direction of improvement. Columns that have one can be objectives.
        fold: Rule that folds replicates. None if rows of the results table lack the column, or if
            it is computed from the folded rows of a run.
        stage: Stage at which it gets its value.
        bounded: Whether a column of stage ``run`` has a 95 % interval, ``NAME_low`` and
            ``NAME_high``.
        exact: Whether shapes and settings determine the value. Equal replicates then have an
            interval of length 0; otherwise their equality may be by chance, and they have none.
        tells_apart: Whether replicates that differ in it belong to different rows.
        condition: Whether rows that differ in it are not compared, and replicates that differ in
            it are never folded together.
        in_table: Whether tables show it as a column of their own.
        group: Group of columns, one of :data:`GROUPS`.
    """

    name: str
    about: str
    unit: str = ""
    type: ColumnType = "float"
    better: Direction | None = None
    fold: Fold | None = None
    stage: Stage = "replicate"
    bounded: bool = False
    exact: bool = False
    tells_apart: bool = False
    condition: bool = False
    in_table: bool = True
    group: str = "export"

    @property
    def interval(self) -> bool:
        """Whether ``NAME_low`` and ``NAME_high`` bound its 95 % interval in folded rows."""
        return self.bounded or (self.fold is not None and self.fold.interval)

    @property
    def log(self) -> bool:
        """Whether that interval is one on a log scale, and differences are factors."""
        return self.fold is not None and self.fold.log

    @property
    def folded_type(self) -> ColumnType:
        """Type of its values in rows of the results table."""
        return (self.fold.type if self.fold is not None else None) or self.type

    @property
    def of_replicates(self) -> bool:
        """Whether a single replicate has it."""
        return self.stage in ("replicate", "twin")

    @property
    def of_configurations(self) -> bool:
        """Whether a row of the results table has it."""
        return self.fold is not None or self.stage == "run"


def in_group(group: str, *columns: Column) -> tuple[Column, ...]:
    """Return columns that the table shows under one group.

    Args:
        group: One of :data:`GROUPS`.
        columns: The columns in the order of the table.

    Raises:
        ValueError: The group is unknown.
    """
    if group not in GROUPS:
        raise ValueError(f"column group {group!r} must be one of {', '.join(GROUPS)}")
    return tuple(replace(column, group=group) for column in columns)


def all_columns() -> tuple[Column, ...]:
    """Return every declared column in the order of :data:`GROUPS`.

    Within a group the order is that of the metric groups' names, then that of the declarations.
    """
    return _ordered(METRICS.names())


def _in_order(metrics: Iterable[Column]) -> list[Column]:
    return sorted((*all_columns(), *metrics), key=lambda column: GROUPS.index(column.group))


@lru_cache(maxsize=1)
def _ordered(metric_groups: tuple[str, ...]) -> tuple[Column, ...]:
    declared: list[Column] = []
    for name in metric_groups:
        group: Any = METRICS.get(name)
        declared += group.columns
    return tuple(sorted(declared, key=lambda column: GROUPS.index(column.group)))


def is_metric(name: str) -> bool:
    """Return whether a name is that of a column with a metric of the workload."""
    return name.startswith(METRIC) and name not in (METRIC, LOSS)


def metric_names(metrics: Iterable[str]) -> dict[str, str]:
    """Return the columns of a workload's metrics, by metric.

    ``loss`` has no such column; it is ``final_loss``. A metric whose name is that of another one
    with ``_low`` or ``_high`` at the end has none either: bounds are named so.
    """
    names = {metric: METRIC + metric for metric in metrics}
    without = {LOSS, *(name + end for name in names.values() for end in BOUNDS)}
    return {metric: name for metric, name in names.items() if name not in without}


def metric_columns(rows: Iterable[Row]) -> tuple[Column, ...]:
    """Return the columns with metrics of the workload that rows have, in alphabetical order."""
    names = {name for row in rows for name in row if is_metric(name)}
    bounds = {name + end for name in names for end in BOUNDS}
    return tuple(_metric_column(name) for name in sorted(names - bounds))


def _metric_column(name: str) -> Column:
    group: Any = METRICS.get("logged")
    column: Column = group.column(name)
    return column


def find_column(name: str) -> Column | None:
    """Return the column with this name, or None."""
    if is_metric(name):
        return _metric_column(name)
    return next((column for column in all_columns() if column.name == name), None)


def group_columns(group: str) -> tuple[Column, ...]:
    """Return the columns of one group in order."""
    return tuple(column for column in all_columns() if column.group == group)


def objectives() -> dict[str, Direction]:
    """Return the columns that a study can optimise, and the direction of each."""
    return {column.name: column.better for column in all_columns() if column.better is not None}


@lru_cache(maxsize=1)
def conditions() -> tuple[str, ...]:
    """Return the names of the columns that are conditions of a measurement, in order."""
    return tuple(column.name for column in all_columns() if column.condition)


def replicate_columns(metrics: Iterable[Column] = ()) -> tuple[Column, ...]:
    """Return the columns of ``trials.parquet`` in order.

    Args:
        metrics: Columns with metrics of the workload.
    """
    return tuple(column for column in _in_order(metrics) if column.of_replicates)


def configuration_columns(metrics: Iterable[Column] = ()) -> tuple[Column, ...]:
    """Return the columns of ``configurations.parquet``, CSV and JSON in order, without bounds.

    Texts of the group ``export``, of variable length, come last.

    Args:
        metrics: Columns with metrics of the workload.
    """
    columns = [column for column in _in_order(metrics) if column.of_configurations]
    return tuple(sorted(columns, key=lambda each: each.group == "export" and each.type == "text"))
