"""Notes below the results table: signs, warnings and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rayhive.columns import Column, Row, configuration_columns, group_columns
from rayhive.metrics.folds import Extreme, Mean
from rayhive.metrics.timeline import UNCOUNTED
from rayhive.report.results import Results

STAR = "★"
DAGGER = "†"


def table_notes(
    results: Results, rows: Sequence[Row], empty: Sequence[str], texts: Sequence[str]
) -> Iterator[str]:
    """Yield the notes of a table.

    Args:
        results: Results that the rows belong to.
        rows: Rows of the table.
        empty: Names of the columns that are left out because they are empty in every row.
        texts: Texts of all cells.
    """
    if not rows:
        yield "No replicate has finished."
    yield from _signs(results, rows, texts)
    yield from _warnings(results, rows)
    if empty:
        yield f"Empty in every row and left out: {', '.join(empty)}."
    for column in group_columns("provenance"):
        yield from _provenance(rows, column)


def _signs(results: Results, rows: Sequence[Row], texts: Sequence[str]) -> Iterator[str]:
    """Yield the meaning of the signs that the table contains."""
    if any(row["pareto"] for row in rows):
        objectives = (f"{name} ({better})" for name, better in results.objectives.items())
        yield f"{STAR} on the Pareto front of {', '.join(objectives)}."
    if any(" ± " in text for text in texts):
        yield "± half of the 95 % t-interval of the mean over the n replicates that finished."
    for column in configuration_columns():
        if isinstance(column.fold, Mean) and column.fold.survivors:
            name = column.name
            if any(row["n_failed"] and row[name] is not None for row in rows):
                yield (
                    f"{name} x (k/n): mean over the k of n replicates that finished; the rest "
                    "diverged, failed or were invalid."
                )
    if any(text.startswith("≥") for text in texts):
        yield (
            "≥ x (k/n): mean over the k of n replicates that reached the target; the rest missed "
            "it or failed."
        )
    if any(text.startswith(">") for text in texts):
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
    violated = [row for row in rows if row["invariants_violated"]]
    if violated:
        yield f"In {count_text(len(violated), 'row')} an invariant was violated."
    wrong = [row for row in rows if row["payload_matches"] is False]
    if wrong:
        yield f"In {count_text(len(wrong), 'row')} the payload differs from the exact prediction."


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
    if isinstance(column.fold, Extreme):
        yield f"{column.name}: {column.fold.choose(values)}"
    else:
        yield f"{column.name}: {' | '.join(values)}"
