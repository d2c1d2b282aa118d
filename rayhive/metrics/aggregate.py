"""Aggregation: from rows of replicates to rows of the results table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rayhive.columns import (
    BOUNDS,
    Column,
    FoldedRow,
    Replicates,
    Row,
    all_columns,
    conditions,
    configuration_columns,
    find_column,
    metric_columns,
)
from rayhive.metrics.folds import Mean, RestrictedMean
from rayhive.registry import METRICS
from rayhive.timeline import FINISHED, UNCOUNTED


def row_key() -> tuple[str, ...]:
    """Return the columns in which the replicates of one row agree, if nothing else is asked for."""
    return tuple(column.name for column in all_columns() if column.tells_apart)


def fold(rows: Iterable[Row], by: Sequence[str] = (), objectives: Iterable[str] = ()) -> list[Row]:
    """Fold replicates into one row per configuration and scenario.

    Each column is folded by the rule in its declaration (:mod:`rayhive.metrics.folds`). Stopped
    and unfinished replicates are left out. Columns of stage ``run`` are None.

    Args:
        rows: Rows of :func:`rayhive.metrics.rows.timeline_row`, each replicate once.
        by: Configuration columns: replicates that agree in these and in the conditions
            (:func:`rayhive.columns.conditions`) make one row, whatever their other settings. By
            default all settings.
        objectives: Columns that every row has to have, also those of metrics that no replicate was
            evaluated for.

    Returns:
        Rows in the order in which their first replicate appears.
    """
    key = tuple(dict.fromkeys((*by, "baseline", *conditions()))) if by else row_key()
    counted = [row for row in rows if row["state"] not in UNCOUNTED]
    metrics = metric_columns([*counted, dict.fromkeys(objectives)])
    missing: Row = dict.fromkeys(column.name for column in metrics)
    groups = rows_by(({**missing, **row} for row in counted), key)
    return [_fold_group(group, configuration_columns(metrics)) for group in groups]


def rows_by(rows: Iterable[Row], names: Iterable[str]) -> list[list[Row]]:
    """Return groups of the rows that agree in some columns, in the order of their first rows."""
    names, groups = tuple(names), defaultdict[str, list[Row]](list)
    for row in rows:
        groups[json.dumps([row.get(name) for name in names])].append(row)
    return list(groups.values())


def _fold_group(rows: list[Row], columns: Iterable[Column]) -> Row:
    replicates = Replicates(rows, [row for row in rows if row["state"] in FINISHED])
    folded = FoldedRow(replicates)
    for column in columns:
        names = (column.name, *(column.name + end for end in BOUNDS if column.bounded))
        folded |= dict.fromkeys(names) if column.fold is None else column.fold(column, replicates)
    return folded


def rank_rows(rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str] = ()) -> None:
    """Set the columns that compare the folded rows of a run with each other.

    Baselines are no candidates of the study and keep None.

    Args:
        rows: Every row of :func:`fold`, changed in place.
        objectives: Column to ``minimize`` or ``maximize``.
        by: Configuration columns that make a row; empty for all of them.
    """
    candidates = [row for row in rows if row["baseline"] is None]
    for _, group in METRICS.items():
        group().rank(candidates, objectives, by)


def ran(row: Row) -> int:
    """Return the number of replicates of a folded row, failed and pruned ones included.

    Lost and skipped ones are not.
    """
    return int(row["n"] or 0) + unfinished(row)


def unfinished(row: Row) -> int:
    """Return how many replicates of a folded row failed or were pruned: they have no result."""
    return int(row["n_failed"] or 0) + int(row.get("n_pruned") or 0)


def is_censored(row: Row, name: str) -> bool:
    """Return whether a folded value is a lower bound: not all replicates reached the target."""
    column, reached = find_column(name), row["reached"]
    bound = column is not None and isinstance(column.fold, RestrictedMean)
    return bound and reached is not None and reached != ran(row)


def objectives_known(row: Row, objectives: Iterable[str]) -> bool:
    """Return whether every objective of a folded row is known, and of all its replicates.

    A failed or pruned replicate has no objectives, so a row with one is not known. A row with
    skipped replicates was measured less than the others.
    """
    return (
        not unfinished(row)
        and not row.get("n_skipped")
        and all(
            find_column(name) is not None
            and row.get(name) is not None
            and not is_censored(row, name)
            and of_all(row, name)
            for name in objectives
        )
    )


def of_all(row: Row, name: str) -> bool:
    """Return whether the mean of a folded row is over all replicates that finished.

    A replicate may have no value, such as the duration of a round where none was completed.
    """
    column = find_column(name)
    if column is None or not isinstance(column.fold, Mean) or not isinstance(row, FoldedRow):
        return True
    return all(one.get(name) is not None for one in row.replicates.finished)


def is_candidate(row: Row, objectives: Iterable[str]) -> bool:
    """Return whether a folded row can be compared with others in every objective.

    A row with a 0 in a column on a log scale, such as the throughput of a replicate without a
    round, cannot: its mean has no logarithm.
    """
    return objectives_known(row, objectives) and not without_logarithm(row, objectives)


def without_logarithm(row: Row, names: Iterable[str]) -> list[str]:
    """Return the columns on a log scale in which a replicate of a folded row has a 0."""
    columns = [column for column in map(find_column, names) if column is not None]
    return [each.name for each in columns if each.log and row.get(each.name) == 0]


def comparable(a: Row, b: Row) -> bool:
    """Return whether two rows were measured under the same conditions."""
    return all(a.get(name) == b.get(name) for name in conditions())
