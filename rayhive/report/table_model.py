"""Model of the results table: its columns, the texts of its cells, and their marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayhive.columns import Column, Row, configuration_columns, find_column
from rayhive.metrics.aggregate import CONDITIONS, comparable, is_censored, ran
from rayhive.metrics.cell_text import parse_times
from rayhive.metrics.folds import Mean, Percentile, Total
from rayhive.metrics.rows import NO_FAULTS
from rayhive.metrics.stats import censored_percentile
from rayhive.report.numbers import estimate_text, number_text
from rayhive.report.results import Results
from rayhive.report.table_notes import DAGGER, STAR, count_text, table_notes

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
    """

    title: str
    columns: tuple[Column, ...]
    keys: int
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


def build_table(results: Results, rows: Sequence[Row]) -> TableModel:
    """Return the table of ``rows``.

    Args:
        results: Results that the rows belong to.
        rows: ``results.folded`` in the order of the table.
    """
    keys = _keys(results, rows)
    shown = [column for column in configuration_columns() if _is_shown(column, results)]
    full = [column for column in shown if any(_text(row, column) != EMPTY for row in rows)]
    columns = [*keys, *(column for column in full if column not in keys)]
    cells = [
        tuple(_cell(row, rows, column, first=column is columns[0]) for column in columns)
        for row in rows
    ]
    empty = [column.name for column in shown if column not in full] if rows else []
    texts = [cell.text for line in cells for cell in line]
    return TableModel(
        title=_title(results, rows),
        columns=tuple(columns),
        keys=len(keys),
        rows=tuple(cells),
        notes=tuple(table_notes(results, rows, empty, texts)),
    )


def _keys(results: Results, rows: Sequence[Row]) -> list[Column]:
    names = list(results.by or ("configuration",))
    names += [n for n in CONDITIONS if n not in names and len({row.get(n) for row in rows}) > 1]
    return [column for name in names if (column := find_column(name)) is not None]


def _is_shown(column: Column, results: Results) -> bool:
    if not column.in_table or column.group == "export":
        return False
    if column.group in _OF_FAULTS and not is_faulted(results):
        return False
    if results.by and column.group == "configuration":
        return column.name in (*results.by, *CONDITIONS) or not column.tells_apart
    return True


def is_faulted(results: Results) -> bool:
    """Return whether the run has a scenario with faults."""
    return any(row["scenario"] != NO_FAULTS for row in results.rows)


def _title(results: Results, rows: Sequence[Row]) -> str:
    replicates = count_text(sum(map(ran, rows)), "replicate")
    return f"{results.name}: {count_text(len(rows), 'row')} of {replicates}"


# -- cells -------------------------------------------------------------------------------------


def _cell(row: Row, rows: Sequence[Row], column: Column, first: bool) -> Cell:
    text = _text(row, column)
    if first and row["pareto"]:
        text = f"{STAR} {text}"
    return Cell(text, best=separates(row, rows, column))


def _text(row: Row, column: Column) -> str:
    name, value, rule = column.name, row[column.name], column.fold
    if value is None:
        return bound_text(row, name) or EMPTY
    if isinstance(rule, Total) and rule.share:
        return f"{value}/{ran(row)}"
    if name == "n" and row["n_timed_out"]:
        return f"{value} ({row['n_timed_out']}{DAGGER})"
    if isinstance(value, str):
        return value
    if column.group == "configuration" and isinstance(value, float):
        return f"{value:.6g}"
    if is_censored(row, name):
        return f"≥ {number_text(value)} ({row['reached']}/{ran(row)})"
    text = estimate_text(value, _half_width(row, name) if column.interval else None)
    if isinstance(rule, Mean) and rule.survivors and row["n_failed"]:
        return f"{text} ({row['n']}/{ran(row)})"
    return text


def bound_text(row: Row, name: str) -> str | None:
    """Return the lower bound of a percentile that depends on censored times.

    None if there are no times, or if the column is not such a percentile.
    """
    column = find_column(name)
    rule = None if column is None else column.fold
    if not isinstance(rule, Percentile) or row[rule.of] is None:
        return None
    times = parse_times([str(row[rule.of])])
    bound = censored_percentile(times, rule.percent)
    if bound is None:
        return None
    censored = sum(each.censored for each in times)
    return f"> {number_text(round(bound.seconds, 3))} ({censored} of {len(times)} censored)"


def _half_width(row: Row, name: str) -> float | None:
    bounds = _bounds(row, name)
    return None if bounds is None else (bounds[1] - bounds[0]) / 2


def separates(row: Row, rows: Sequence[Row], column: Column) -> bool:
    """Return whether a row's interval is on the better side of every interval it is compared with.

    Rows under the same conditions that have a value in the column are compared. Nothing separates
    from a row without an interval, which could be anywhere. A row without such rivals is not
    marked, nor is a row with failed replicates, whose values are only those of the finished ones.
    """
    if column.better is None or not column.interval or row["n_failed"]:
        return False
    name = column.name
    rivals = [
        other
        for other in rows
        if other is not row and other[name] is not None and comparable(row, other)
    ]
    mine = _bounds(row, name)
    if mine is None or not rivals:
        return False
    for rival in rivals:
        theirs = _bounds(rival, name)
        if theirs is None:
            return False
        if not (mine[1] < theirs[0] if column.better == "minimize" else mine[0] > theirs[1]):
            return False
    return True


def _bounds(row: Row, name: str) -> tuple[float, float] | None:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return (low, high) if isinstance(low, float) and isinstance(high, float) else None
