"""Notes below the results table: signs, warnings and provenance."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from rayhive.columns import Column, Row, group_columns
from rayhive.metrics.aggregate import unfinished
from rayhive.metrics.folds import Mean, Percentile, Reduced, known
from rayhive.report.advice import certainty_notes
from rayhive.report.numbers import with_times_signs
from rayhive.report.results import Results
from rayhive.spec.pruning import PRUNED
from rayhive.timeline import UNCOUNTED

STAR = "★"
DAGGER = "†"
#: Text of a comparison with the twin that some replicates lack.
_PAIRED = re.compile(r"\(\d+ of \d+\)$")


def notes(
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
    for column in columns:
        if isinstance(column.fold, Mean) and column.fold.survivors:
            name = column.name
            if any(unfinished(row) and row[name] is not None for row in rows):
                yield (
                    f"{name} x (k/n): mean over the k of n replicates that finished; the rest "
                    "diverged, failed, were invalid or were stopped early."
                )
    if any(_PAIRED.search(text) for text in texts):
        yield "x (k of n): over the k of n replicates that have a twin without faults to compare."
    if any(text.startswith("≥") for text in texts):
        cut = "missed it or was pruned" if any(row["n_pruned"] for row in rows) else "missed it"
        failed = any(row["n_failed"] for row in rows)
        rest = "; where the others only failed, at the longest known time" if failed else ""
        yield (
            "≥ x (k/n): k of n replicates reached the target. x, a lower bound, is the geometric "
            f"mean of all times, each cut at the end of the shortest replicate that {cut}{rest}."
        )
    if any(text.endswith(" censored)") for text in texts):
        yield (
            "> x (c of m censored): the percentile of m times, of which c had not ended when the "
            "training did, is larger than x; x to y: it lies between them."
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
    yield from _pruned_notes(results, rows)
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
    swarms = [row for row in rows if row["baseline"] is None]
    incomplete = [row for row in swarms if (row["rounds_complete"] or 0) != (row["rounds"] or 0)]
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
        text = f"In {count_text(len(violated), 'row')} an invariant was violated"
        yield f"{text}: {_named(violated)}."
    wrong = [row for row in rows if row["payload_matches"] is False]
    if wrong:
        yield f"In {count_text(len(wrong), 'row')} the payload differs from the exact prediction."


def _named(rows: Sequence[Row], most: int = 3) -> str:
    """Return the names of the first rows, and how many there are besides."""
    names = [f"{row['configuration']} with scenario {row['scenario']}" for row in rows[:most]]
    more = [f"{len(rows) - most} more"] if len(rows) > most else []
    return "; ".join([*names, *more])


def _pruned_notes(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    pruned = sum(int(row["n_pruned"] or 0) for row in rows)
    if pruned:
        why = next(r["stop_reason"] for r in results.rows if r["state"] == PRUNED)
        yield (
            f"{count_text(pruned, 'replicate')} stopped early by the pruner (n_pruned): in no "
            f"mean, and the target counts as missed. The first: {why}."
        )
    skipped = sum(int(row["n_skipped"] or 0) for row in rows)
    if skipped:
        yield (
            f"{count_text(skipped, 'replicate')} not run by the pruner (n_skipped): the row could "
            "not be on the Pareto front any more."
        )


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
    """Return the note about an attempt that could not be read."""
    return f"Damaged and left out: {text}"


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
        yield f"{column.name}: {with_times_signs(' | '.join(values))}"
