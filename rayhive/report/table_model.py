"""What a reader sees of the results: which columns, which words, which marks, which notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayhive.columns import COLUMNS, PROVENANCE, Column
from rayhive.metrics.aggregate import CONDITIONS, is_censored, ran
from rayhive.metrics.faults import TIMES, text_times
from rayhive.metrics.group import Row
from rayhive.metrics.rows import NO_FAULTS
from rayhive.metrics.stats import censored_percentile
from rayhive.metrics.timeline import UNCOUNTED
from rayhive.report.numbers import estimate_text, number_text
from rayhive.report.pareto import comparable, describe
from rayhive.report.results import Results

#: Groups that say something only beside a run in which something broke.
_OF_FAULTS = frozenset({"time", "robustness"})
EMPTY = "-"
STAR = "★"
DAGGER = "†"


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: What it says.
        best: Whether its interval lies on the better side of every other row's.
    """

    text: str
    best: bool = False


@dataclass(frozen=True)
class TableModel:
    """A table for readers; formats only draw it.

    Attributes:
        title: One line above it.
        columns: Its columns; those of a group stand together.
        keys: How many of the first columns say what a row is, to be repeated where a table is
            broken into blocks.
        rows: Its cells.
        notes: Lines below it.
    """

    title: str
    columns: tuple[Column, ...]
    keys: int
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]


def make_sheet(results: Results, rows: Sequence[Row]) -> TableModel:
    """Lay ``rows`` out.

    Args:
        results: Where they come from.
        rows: ``results.folded`` in the order in which they are to stand.
    """
    keys = _keys(results, rows)
    wanted = [column for column in COLUMNS if _shown(column, results)]
    full = [column for column in wanted if any(_text(row, column) != EMPTY for row in rows)]
    columns = [*keys, *(column for column in full if column not in keys)]
    cells = [
        tuple(_cell(row, rows, column, first=column is columns[0]) for column in columns)
        for row in rows
    ]
    empty = [column.name for column in wanted if column not in full] if rows else []
    return TableModel(
        title=_title(results, rows),
        columns=tuple(columns),
        keys=len(keys),
        rows=tuple(cells),
        notes=tuple(_notes(results, rows, empty, cells)),
    )


def _keys(results: Results, rows: Sequence[Row]) -> list[Column]:
    names = list(results.by or ("configuration",))
    names += [n for n in CONDITIONS if n not in names and len({row.get(n) for row in rows}) > 1]
    by_name = {column.name: column for column in COLUMNS}
    return [by_name[name] for name in names]


def _shown(column: Column, results: Results) -> bool:
    if column.group == "provenance" or column.name == "pareto":
        return False  # a note, and a star
    if column.group in _OF_FAULTS and not is_faulted(results):
        return False
    if results.by and column.group == "configuration":
        return column.name in (*results.by, *CONDITIONS, "data")
    return True


def is_faulted(results: Results) -> bool:
    """Return whether anything was to be broken in the run."""
    return any(row["scenario"] != NO_FAULTS for row in results.rows)


def _title(results: Results, rows: Sequence[Row]) -> str:
    replicates = sum(map(ran, rows))
    return f"{results.name}: {_count(len(rows), 'row')} of {_count(replicates, 'replicate')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# -- cells -------------------------------------------------------------------------------------


def _cell(row: Row, rows: Sequence[Row], column: Column, first: bool) -> Cell:
    text = _text(row, column)
    if first and row["pareto"]:
        text = f"{STAR} {text}"
    return Cell(text, best=separates(row, rows, column))


def _text(row: Row, column: Column) -> str:
    name, value = column.name, row[column.name]
    if value is None:
        return bound_text(row, name) or EMPTY
    if name == "reached":
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
    # The best of a configuration that diverges would look like its mean.
    return f"{text} ({row['n']}/{ran(row)})" if _of_survivors(row, name) else text


def _of_survivors(row: Row, name: str) -> bool:
    """Return whether a loss is only that of the replicates that did not diverge or fail."""
    return name == "final_loss" and bool(row["n_failed"]) and row[name] is not None


def bound_text(row: Row, name: str) -> str | None:
    """Return what is known of a percentile that depends on times which were not seen to end.

    None where nothing is known, or ``name`` is no such percentile.
    """
    time, _, percent = name.removesuffix("_s").rpartition("_p")
    if time not in TIMES or not percent.isdigit():
        return None
    times = text_times([str(row[f"{time}_s"])] if row[f"{time}_s"] is not None else [])
    bound = censored_percentile(times, int(percent))
    if bound is None:
        return None
    censored = sum(each.censored for each in times)
    return f"> {number_text(round(bound.seconds, 3))} ({censored} of {len(times)} censored)"


def _half_width(row: Row, name: str) -> float | None:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return (high - low) / 2 if isinstance(low, float) and isinstance(high, float) else None


def separates(row: Row, rows: Sequence[Row], column: Column) -> bool:
    """Return whether a row's interval lies on the better side of all that it compares with.

    Compared are rows under the same conditions that have a value in the column. One of them
    without an interval could lie anywhere, so nothing separates from it; and a row with nothing
    to compare with is not marked. Nor is one of which a replicate failed: its values are only of
    those that did not.
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


# -- notes -------------------------------------------------------------------------------------


def _notes(
    results: Results,
    rows: Sequence[Row],
    empty: Sequence[str],
    cells: Sequence[Sequence[Cell]],
) -> Iterator[str]:
    if not rows:
        yield "No replicate has finished."
    texts = [cell.text for line in cells for cell in line]
    if any(row["pareto"] for row in rows):
        yield f"{STAR} on the Pareto front of {', '.join(describe(results.objectives))}."
    if any(" ± " in text for text in texts):
        yield "± half of the 95 % t-interval of the mean over the n replicates that finished."
    if any(_of_survivors(row, "final_loss") for row in rows):
        yield (
            "final_loss x (k/n): of the k of n replicates that finished; the others diverged, "
            "failed or were invalid, and no loss of theirs is in it."
        )
    if any(text.startswith("≥") for text in texts):
        yield (
            "≥ x (k/n): mean over the k of n replicates that reached the target; the others missed "
            "it or failed."
        )
    if any(text.startswith(">") for text in texts):
        yield (
            "> x (c of m censored): the percentile of m times, of which c had not ended when the "
            "training did, is larger than x."
        )
    if any(row["n_failed"] and row["n"] for row in rows):
        yield "Rows with failed replicates (n_failed) show the others' values, and get no mark."
    if any(row["n_timed_out"] for row in rows):
        yield f"{DAGGER} ended by the time limit; counted in n and in the means."
    yield from _warnings(results, rows)
    if empty:
        yield f"Empty in every row and left out: {', '.join(empty)}."
    for column in PROVENANCE:
        yield from _provenance(rows, column)


def _warnings(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    uncounted = Counter(str(r["state"]) for r in results.rows if r["state"] in UNCOUNTED)
    if uncounted:
        listed = ", ".join(f"{count} {state}" for state, count in sorted(uncounted.items()))
        yield f"Replicates that are not counted: {listed}."
    taken = sum(int(row["n_lost"] or 0) for row in rows)
    if taken:
        yield (
            f"{_count(taken, 'replicate')} lost to the infrastructure (n_lost), in no number here: "
            "`rayhive retry DIR` runs what was lost again."
        )
    yield from (damage_note(text) for text in results.damaged)
    lost = [row for row in rows if (row["rounds_complete"] or 0) != (row["rounds"] or 0)]
    if lost:
        yield (
            f"In {_count(len(lost), 'row')} not every round was averaged by all peers at the first "
            "attempt; payload_bytes_per_round is over those that were (rounds_complete)."
        )
    censored = sum(int(row["censored"] or 0) for row in rows)
    if censored:
        yield (
            f"Of {_count(censored, 'fault')} the detection, recovery or rejoin was not seen before "
            "the end (censored)."
        )
    violated = [row for row in rows if row["invariants_violated"]]
    if violated:
        yield f"In {_count(len(violated), 'row')} an invariant was violated."
    wrong = [row for row in rows if row["payload_matches"] is False]
    if wrong:
        yield f"In {_count(len(wrong), 'row')} the payload differs from the exact prediction."


def damage_note(text: str) -> str:
    """Return the note about a replicate that could not be read."""
    return f"Damaged and left out: {text}. A further `rayhive sweep` runs that replicate again."


def _provenance(rows: Sequence[Row], column: Column) -> Iterator[str]:
    values = sorted({str(row[column.name]) for row in rows if row[column.name] is not None})
    if not values:
        return
    if column.name in ("started", "ended"):
        yield f"{column.name}: {min(values) if column.name == 'started' else max(values)}"
    else:
        yield f"{column.name}: {' | '.join(values)}"
