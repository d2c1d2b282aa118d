"""Results table for readers: its columns, the texts and marks of its cells, and its notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayhive.columns import (
    Column,
    FoldedRow,
    Row,
    Value,
    conditions,
    configuration_columns,
    find_column,
    metric_columns,
)
from rayhive.metrics.aggregate import comparable, is_censored, of_all, ran, unfinished
from rayhive.metrics.folds import (
    Mean,
    Percentile,
    RestrictedMean,
    Total,
    known,
    parse_times,
)
from rayhive.metrics.rows import NO_FAULTS
from rayhive.metrics.stats import percentile_bounds
from rayhive.report.advice import advice_lines, percent_text
from rayhive.report.brief import brief_columns
from rayhive.report.numbers import estimate_text, interval_text, number_text, with_times_signs
from rayhive.report.results import Results
from rayhive.report.table_notes import DAGGER, STAR, count_text, notes

#: Groups that are shown only if the run has a scenario with faults.
_OF_FAULTS = frozenset({"time", "robustness"})
EMPTY = "-"


@dataclass(frozen=True)
class Cell:
    """Cell of the table.

    Attributes:
        text: Text of the cell.
        best: Whether its interval is on the better side of every other row's.
    """

    text: str
    best: bool = False


@dataclass(frozen=True)
class TableModel:
    """Table for readers, independent of the output format.

    Attributes:
        title: Line above the table.
        columns: Columns; those of a group are adjacent.
        keys: Number of leading columns that identify a row. A table that is broken into blocks
            repeats them.
        rows: Cells.
        notes: Lines below the table.
        advice: Sentences above the table: which row to take, and how sure that is.
        brief: Whether it is one block of few columns.
        best_note: Meaning of the mark of a cell that is ``best``.
    """

    title: str
    columns: tuple[Column, ...]
    keys: int
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...] = ()
    brief: bool = False
    best_note: str = "the value's interval lies on the better side of every other row's."


def build_table(
    results: Results, rows: Sequence[Row], columns: Sequence[str] = (), wide: bool = False
) -> TableModel:
    """Return the table of ``rows``.

    Args:
        results: Results that the rows belong to.
        rows: ``results.folded`` in the order of the table.
        columns: Names of the columns after those that identify a row. By default the objectives
            and their certainty.
        wide: Whether every column is shown that has a value.
    """
    keys = key_columns(results, rows)
    names = None if wide else columns or brief_columns(results.objectives, rows)
    metrics = [item for item in metric_columns(results.rows) if item.name in results.objectives]
    shown = [item for item in configuration_columns(metrics) if _is_shown(item, results)]
    if names is not None:
        shown = [column for name in names if (column := find_column(name)) is not None]
    full = [column for column in shown if any(_text(row, column) != EMPTY for row in rows)]
    all_shown = [*keys, *(column for column in full if column not in keys)]
    cells = [
        tuple(_cell(row, rows, column, first=column is all_shown[0]) for column in all_shown)
        for row in rows
    ]
    empty = [column.name for column in shown if column not in full] if rows and not names else []
    texts = [cell.text for line in cells for cell in line]
    replicates = count_text(sum(map(ran, rows)), "replicate")
    return TableModel(
        title=f"{results.name}: {count_text(len(rows), 'row')} of {replicates}{_each(rows)}",
        columns=tuple(all_shown),
        keys=len(keys),
        rows=tuple(cells),
        notes=tuple(notes(results, rows, empty, texts, all_shown, brief=names is not None)),
        advice=tuple(advice_lines(results, rows)) if rows else (),
        brief=names is not None,
    )


def _each(rows: Sequence[Row]) -> str:
    """Return the number of replicates of a row, if all rows have the same and more than one."""
    counts = {row["n"] for row in rows}
    alike = len(rows) > 1 and len(counts) == 1 and all(ran(row) == row["n"] for row in rows)
    return f", {counts.pop()} each" if alike else ""


def key_columns(results: Results, rows: Sequence[Row]) -> list[Column]:
    """Return the columns that identify a row: its configuration, and differing conditions."""
    names = list(results.by or ("configuration",))
    if results.by and any(row["baseline"] for row in rows):
        names.append("baseline")
    names += [n for n in conditions() if n not in names and len({row.get(n) for row in rows}) > 1]
    return [column for name in names if (column := find_column(name)) is not None]


def _is_shown(column: Column, results: Results) -> bool:
    if not column.in_table or column.group == "export":
        return False
    if column.group in _OF_FAULTS and all(row["scenario"] == NO_FAULTS for row in results.rows):
        return False
    if results.by and column.group == "configuration":
        return column.name in (*results.by, *conditions()) or not column.tells_apart
    return True


# -- cells -------------------------------------------------------------------------------------


def _cell(row: Row, rows: Sequence[Row], column: Column, first: bool) -> Cell:
    text = _text(row, column)
    if first and row["pareto"]:
        text = f"{STAR} {text}"
    return Cell(text, best=separates(row, rows, column))


def _text(row: Row, column: Column) -> str:
    name, value, rule = column.name, row[column.name], column.fold
    if value is None:
        return missed_text(row, column) or bound_text(row, name) or EMPTY
    if isinstance(rule, Total) and rule.share:
        return f"{value}/{ran(row)}"
    if name == "n" and row["n_timed_out"]:
        return f"{value} ({row['n_timed_out']}{DAGGER})"
    if name == "pareto_probability":
        return percent_text(float(value))
    if isinstance(value, str):
        return with_times_signs(value) if column.group == "provenance" else value
    if column.group == "configuration" and isinstance(value, float):
        return f"{value:.6g}"
    text = value_text(row, column)
    if is_censored(row, name):
        return f"≥ {text} ({row['reached']}/{ran(row)})"
    if isinstance(rule, Mean) and rule.survivors and unfinished(row):
        return f"{text} ({row['n']}/{ran(row)})"
    if column.stage == "twin" and (pairs := _pairs(row, column)) is not None:
        return f"{text} ({pairs} of {row['n']})"
    return text


def _pairs(row: Row, column: Column) -> int | None:
    """Return how many replicates were compared with their twin; None if all or not known."""
    if not isinstance(row, FoldedRow):
        return None
    count = len(known(row.replicates.finished, column.name))
    return None if count == row["n"] else count


def value_text(row: Row, column: Column) -> str:
    """Return a number of a row with its interval.

    ``x ± h`` on a linear scale, ``x [low, high]`` on a log scale.
    """
    name, value = column.name, float(row[column.name] or 0)
    if not column.interval:
        return number_text(value)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if column.log:
        return interval_text(value, _float(low), _float(high))
    if column.bounded:
        return interval_text(value, _float(low), _float(high))
    bounds = _bounds(row, name)
    return estimate_text(value, None if bounds is None else (bounds[1] - bounds[0]) / 2)


def _float(value: Value) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def missed_text(row: Row, column: Column) -> str | None:
    """Return that no replicate reached the target; None for other columns, or without a target."""
    if not isinstance(column.fold, RestrictedMean) or row["reached"] != 0:
        return None
    return f"missed (0/{ran(row)})"


def bound_text(row: Row, name: str) -> str | None:
    """Return the bounds of a percentile that depends on censored times; the upper may be infinite.

    None if there are no times, or if the column is not such a percentile.
    """
    column = find_column(name)
    rule = None if column is None else column.fold
    if not isinstance(rule, Percentile) or row[rule.of] is None:
        return None
    times = parse_times([str(row[rule.of])])
    bounds = percentile_bounds(times, rule.percent)
    if bounds is None:
        return None
    low, high = (number_text(round(bound, 3)) for bound in bounds)
    between = f"> {low}" if bounds[1] == math.inf else f"{low} to {high}"
    return f"{between} ({sum(each.censored for each in times)} of {len(times)} censored)"


def separates(row: Row, rows: Sequence[Row], column: Column) -> bool:
    """Return whether a row's interval is on the better side of every interval it is compared with.

    Rows under the same conditions that have a value in the column are compared. Nothing separates
    from a row without an interval, which could be anywhere. A row without such rivals is not
    marked, nor is a row with failed, pruned or skipped replicates, whose values are only those of
    the finished ones, or with a missed target, whose time is a lower bound, or with a replicate
    that has no value.
    """
    name = column.name
    if column.better is None or not column.interval or unfinished(row) or row["n_skipped"]:
        return False
    if is_censored(row, name) or not of_all(row, name):
        return False
    rivals = [
        _bounds(other, name)
        for other in rows
        if other is not row and other[name] is not None and comparable(row, other)
    ]
    mine = _bounds(row, name)
    if mine is None or not rivals:
        return False
    if column.better == "minimize":
        return all(theirs is not None and mine[1] < theirs[0] for theirs in rivals)
    return all(theirs is not None and mine[0] > theirs[1] for theirs in rivals)


def _bounds(row: Row, name: str) -> tuple[float, float] | None:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return (low, high) if isinstance(low, float) and isinstance(high, float) else None
