"""Results table for readers: its columns, the texts and marks of its cells, and its notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayhive.columns import (
    Column,
    FoldedRow,
    Row,
    Value,
    conditions,
    configuration_columns,
    find_column,
    group_columns,
    metric_columns,
)
from rayhive.metrics.aggregate import comparable, is_censored, ran
from rayhive.metrics.folds import (
    Mean,
    Percentile,
    Reduced,
    RestrictedMean,
    Total,
    known,
    parse_times,
)
from rayhive.metrics.rows import NO_FAULTS
from rayhive.metrics.stats import censored_percentile
from rayhive.report.advice import advice_lines, certainty_notes, percent_text
from rayhive.report.brief import brief_columns
from rayhive.report.numbers import estimate_text, interval_text, number_text
from rayhive.report.results import Results
from rayhive.timeline import UNCOUNTED

#: Text of a comparison with the twin that some replicates lack.
_PAIRED = re.compile(r"\(\d+ of \d+\)$")
#: Groups that are shown only if the run has a scenario with faults.
_OF_FAULTS = frozenset({"time", "robustness"})
EMPTY = "-"
STAR = "★"
DAGGER = "†"


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
        title=f"{results.name}: {count_text(len(rows), 'row')} of {replicates}",
        columns=tuple(all_shown),
        keys=len(keys),
        rows=tuple(cells),
        notes=tuple(_notes(results, rows, empty, texts, all_shown, brief=names is not None)),
        advice=tuple(advice_lines(results, rows)) if rows else (),
        brief=names is not None,
    )


def key_columns(results: Results, rows: Sequence[Row]) -> list[Column]:
    """Return the columns that identify a row: its configuration, and differing conditions."""
    names = list(results.by or ("configuration",))
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
        return value
    if column.group == "configuration" and isinstance(value, float):
        return f"{value:.6g}"
    text = value_text(row, column)
    if is_censored(row, name):
        return f"≥ {text} ({row['reached']}/{ran(row)})"
    if isinstance(rule, Mean) and rule.survivors and row["n_failed"]:
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


def separates(row: Row, rows: Sequence[Row], column: Column) -> bool:
    """Return whether a row's interval is on the better side of every interval it is compared with.

    Rows under the same conditions that have a value in the column are compared. Nothing separates
    from a row without an interval, which could be anywhere. A row without such rivals is not
    marked, nor is a row with failed replicates, whose values are only those of the finished ones,
    or with a missed target, whose time is a lower bound.
    """
    name = column.name
    if column.better is None or not column.interval or row["n_failed"] or is_censored(row, name):
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


# -- notes -------------------------------------------------------------------------------------


def _notes(
    results: Results,
    rows: Sequence[Row],
    empty: Sequence[str],
    texts: Sequence[str],
    columns: Sequence[Column],
    brief: bool,
) -> Iterator[str]:
    """Yield the notes of a table.

    Args:
        results: Results that the rows belong to.
        rows: Rows of the table.
        empty: Names of the columns that are left out because they are empty in every row.
        texts: Texts of all cells.
        columns: Columns of the table.
        brief: Whether the table has few columns.
    """
    if not rows:
        yield "No replicate has finished."
    yield from _signs(results, rows, texts, columns)
    yield from certainty_notes(rows)
    yield from _warnings(results, rows)
    if empty:
        yield f"Empty in every row and left out: {', '.join(empty)}."
    if brief:
        yield "All columns: --wide, or --columns NAME,NAME; --versus ROW for paired differences."
        return
    for column in group_columns("provenance"):
        yield from _provenance(rows, column)


def _signs(
    results: Results, rows: Sequence[Row], texts: Sequence[str], columns: Sequence[Column]
) -> Iterator[str]:
    """Yield the meaning of the signs that the table contains."""
    if any(row["pareto"] for row in rows):
        objectives = (f"{name} ({better})" for name, better in results.objectives.items())
        yield f"{STAR} on the Pareto front of {', '.join(objectives)}."
    if any(" ± " in text for text in texts):
        yield "x ± h: mean over the n replicates that finished, and half of its 95 % t-interval."
    if any(" [" in text and text.endswith(("]", ")")) for text in texts):
        yield "x [low, high]: geometric mean, and its 95 % t-interval on a log scale."
    if any(isinstance(column.fold, Percentile) and column.interval for column in columns):
        yield "Of detect, stall, recover and rejoin: the median over all faults, and its interval."
    if any(text.startswith("missed (") for text in texts):
        yield "missed (0/n): none of the n replicates reached the target."
    for column in configuration_columns():
        if isinstance(column.fold, Mean) and column.fold.survivors:
            name = column.name
            if any(row["n_failed"] and row[name] is not None for row in rows):
                yield (
                    f"{name} x (k/n): mean over the k of n replicates that finished; the rest "
                    "diverged, failed or were invalid."
                )
    if any(_PAIRED.search(text) for text in texts):
        yield "x (k of n): over the k of n replicates that have a twin without faults to compare."
    if any(text.startswith("≥") for text in texts):
        yield (
            "≥ x (k/n): k of n replicates reached the target. x, a lower bound, is the geometric "
            "mean of all times, each cut at the end of the shortest replicate that missed it."
        )
    if any(text.endswith(" censored)") for text in texts):
        yield (
            "> x (c of m censored): the percentile of m times, of which c had not ended when the "
            "training did, is larger than x."
        )
    if any(row["n_failed"] and row["n"] for row in rows):
        yield "Rows with failed replicates (n_failed) show the values of the rest, without marks."
    if any(row["n_timed_out"] for row in rows):
        yield f"{DAGGER} ended by the time limit; counted in n and in the means."


def _warnings(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    uncounted = Counter(str(r["state"]) for r in results.rows if r["state"] in UNCOUNTED)
    if uncounted:
        listed = ", ".join(f"{count} {state}" for state, count in sorted(uncounted.items()))
        yield f"Replicates that are not counted: {listed}."
    lost = sum(int(row["n_lost"] or 0) for row in rows)
    if lost:
        yield (
            f"{count_text(lost, 'replicate')} lost to the infrastructure (n_lost), in no number "
            "here: `rayhive retry DIR` runs them again."
        )
    yield from (damage_note(text) for text in results.damaged)
    if beside := sum(bool(row.get("nodes_shared")) for row in rows):
        shared = "measured beside others on their nodes (nodes_shared), on which rates depend."
        yield f"{count_text(beside, 'row')} {shared}"
    incomplete = [row for row in rows if (row["rounds_complete"] or 0) != (row["rounds"] or 0)]
    if incomplete:
        yield (
            f"In {count_text(len(incomplete), 'row')} not every round was averaged by all peers at "
            "the first attempt; payload_bytes_per_round is over those that were (rounds_complete)."
        )
    censored = sum(int(row["censored"] or 0) for row in rows)
    if censored:
        yield (
            f"Of {count_text(censored, 'fault')} the detection, recovery or rejoin was not seen "
            "before the end (censored)."
        )
    yield from _clock_note(rows)
    violated = [row for row in rows if row["invariants_violated"]]
    if violated:
        yield f"In {count_text(len(violated), 'row')} an invariant was violated."
    wrong = [row for row in rows if row["payload_matches"] is False]
    if wrong:
        yield f"In {count_text(len(wrong), 'row')} the payload differs from the exact prediction."


def _clock_note(rows: Sequence[Row]) -> Iterator[str]:
    corrected = [row for row in rows if row["clock_correction_s"]]
    if not corrected:
        return
    errors = known(corrected, "clock_uncertainty_s")
    error = f"{max(errors):.3g} s" if len(errors) == len(corrected) else "an unknown time"
    largest = max(known(corrected, "clock_correction_s"))
    yield (
        f"Clocks of nodes differed by up to {largest:.3g} s: times are corrected, and a clock can "
        f"still be wrong by {error}."
    )


def damage_note(text: str) -> str:
    """Return the note about a replicate that could not be read."""
    return f"Damaged and left out: {text}. A further `rayhive sweep` runs that replicate again."


def count_text(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _provenance(rows: Sequence[Row], column: Column) -> Iterator[str]:
    values = sorted({str(row[column.name]) for row in rows if row[column.name] is not None})
    if not values:
        return
    if isinstance(column.fold, Reduced):
        yield f"{column.name}: {column.fold.function(values)}"
    else:
        yield f"{column.name}: {' | '.join(values)}"
