"""Comparison of two runs: differences with intervals, paired where seeds are common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from rayhive.columns import Column, Row, find_column
from rayhive.errors import ConfigError, Problem, unknown
from rayhive.metrics.folds import (
    Mean,
    RestrictedMean,
    event_times,
    restricted,
    restriction,
    some_censored,
)
from rayhive.metrics.seeds import holm
from rayhive.metrics.stats import (
    CONFIDENCE,
    MAX_LOG,
    Estimate,
    estimate,
    log_estimate,
)
from rayhive.report.comparable import (
    allowed_differences,
    different_plans,
    different_settings,
    environment,
    left_out,
    shared_groups,
    unknown_settings,
)
from rayhive.report.settings import Replicate, read_replicates, shared_settings
from rayhive.report.table_notes import count_text, damage_note
from rayhive.timeline import FINISHED, UNCOUNTED, UNKNOWN

#: Columns that are compared besides the objectives, if the runs have them.
KEY_COLUMNS = ("final_loss", "time_to_target_s", "samples_per_s", "round_p50_s", "goodput")

#: Remark where some replicates have no value, because what it measures had not ended.
CENSORED = "not all replicates saw it end"

Verdict = Literal["better", "worse", "larger", "smaller", "equal", "not separable", "not known"]


@dataclass(frozen=True)
class Comparison:
    """One column of one configuration under one scenario, in two runs.

    Attributes:
        configuration: The configuration; of both runs if they have one each, and different ones.
        scenario: The scenario.
        column: The column.
        a: Mean in the first run; geometric for a column on a log scale.
        b: Mean in the second run.
        ratio: Whether the change is b / a, as for columns on a log scale; else it is b - a.
        change: Change from the first run to the second, with its 95 % interval.
        n: Pairs, or the smaller number of replicates of the two if they are not paired.
        paired: Whether replicates of the same seed are compared.
        p: Probability of so large a change by chance, by a t-test; None where there is none.
        p_holm: The same, after Holm's correction for all comparisons of the two runs.
        verdict: Judgement of the second run at a level of 5 % after the correction.
        note: Remark on how the change was obtained.
        censored: Whether the first mean, and the second one, is a lower bound: a replicate did not
            see the event.
    """

    configuration: str
    scenario: str
    column: Column
    a: float | None
    b: float | None
    ratio: bool
    change: Estimate | None
    n: int
    paired: bool
    p: float | None = None
    p_holm: float | None = None
    verdict: Verdict = "not known"
    note: str = ""
    censored: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Comparisons:
    """Comparison of two runs.

    Attributes:
        names: The folders.
        rows: The comparisons, in the order of the first run.
        notes: Differences between the runs, and replicates that were left out.
    """

    names: tuple[str, str]
    rows: tuple[Comparison, ...]
    notes: tuple[str, ...]


def compare(
    a: str | Path, b: str | Path, columns: Sequence[str] = (), allow: Sequence[str] = ()
) -> Comparisons:
    """Compare two runs.

    Args:
        a: The first run folder, or the folder of one replicate.
        b: The second one.
        columns: Columns to compare; by default the objectives and :data:`KEY_COLUMNS`.
        allow: Settings that may differ, as dotted keys of a study, and ``plan`` for fault plans.

    Raises:
        ConfigError: A folder is no run, or the runs cannot be compared; every reason is told.
        DamagedError: The study of a run cannot be read.
    """
    problems = list(_unknown_columns(columns))
    runs = []
    for folder in (a, b):
        try:
            runs.append(read_replicates(folder))
        except ConfigError as error:
            problems += error.problems
    if len(runs) < 2:
        raise ConfigError(problems)
    one, two = runs
    for run, folder in ((one, a), (two, b)):
        if not any(item.row["state"] not in UNCOUNTED for item in run.replicates):
            problems.append(Problem("DIR", str(folder), "a run with finished replicates"))
        codes = sorted({str(item.row["code"]) for item in run.replicates})
        if len(codes) > 1:
            allowed = f"a run with one version of the user's code; it has {', '.join(codes)}"
            problems.append(Problem("DIR", str(folder), allowed))
    if problems:
        raise ConfigError(problems)
    settings = shared_settings(one.replicates, two.replicates)
    problems = [*unknown_settings(*settings, allow), *different_settings(*settings, allow)]
    groups = list(shared_groups(one.replicates, two.replicates, problems))
    problems += different_plans(groups, allow)
    if problems:
        raise ConfigError(problems)
    names = columns or tuple(dict.fromkeys((*one.objectives, *two.objectives, *KEY_COLUMNS)))
    found = [
        made
        for label, scenario, ours, theirs in groups
        for name in names
        if (made := _compared(label, scenario, _column(name), ours, theirs)) is not None
    ]
    notes = [*allowed_differences(settings, allow), *environment(one.replicates, two.replicates)]
    notes += map(damage_note, (*one.damaged, *two.damaged))
    return Comparisons((str(a), str(b)), _corrected(found), (*notes, *left_out(groups)))


# -- what may be compared --------------------------------------------------------------------------


def _unknown_columns(columns: Iterable[str]) -> Iterator[Problem]:
    for name in columns:
        column = find_column(name)
        if column is None or not column.of_replicates or column.type not in ("float", "count"):
            known = [*KEY_COLUMNS, "payload_bytes_per_round", "retention", "metric.NAME"]
            yield unknown("--column", name, known)


def _column(name: str) -> Column:
    column = find_column(name)
    if column is None:
        raise ConfigError(unknown("objectives", name, KEY_COLUMNS))
    return column


# -- differences -----------------------------------------------------------------------------------


def _compared(
    label: str,
    scenario: str,
    column: Column,
    ours: Sequence[Replicate],
    theirs: Sequence[Replicate],
) -> Comparison | None:
    """Return the comparison of one column; None if neither run has values in it."""
    rows = [
        [item.row for item in run if item.row["state"] not in UNKNOWN] for run in (ours, theirs)
    ]
    seeds = [{row["seed"]: row for row in run} for run in rows]
    common = [seed for seed in seeds[0] if seed in seeds[1]]
    paired = bool(common)
    if paired:
        rows = [[side[seed] for seed in common] for side in seeds]
    values, note, missed = _values(column, rows, paired)
    if not any(values) and note != CENSORED:
        return None
    log = isinstance(column.fold, (Mean, RestrictedMean)) and column.fold.log
    log = log and all(value > 0 for side in values for value in side)
    middle = log_estimate if log else estimate
    means = [None if (mean := middle(side)) is None else mean.mean for side in values]
    made = Comparison(
        label,
        scenario,
        column,
        a=means[0],
        b=means[1],
        ratio=log,
        change=None,
        n=min(map(len, values)),
        paired=paired,
        note=note,
        censored=(missed[0] > 0, missed[1] > 0),
    )
    if not made.n:
        return replace(made, note=note or "one run has no value")
    scaled = [[math.log(value) for value in side] if log else side for side in values]
    if paired:
        change, p = _paired(scaled[0], scaled[1], column)
    else:
        change, p = _unpaired(scaled[0], scaled[1], column)
    if any(missed) and p is None:  # times that were cut agree without being equal
        change = Estimate(change.mean, None, None, change.n)
    if log:
        low, high = (None if x is None else _exp(x) for x in (change.low, change.high))
        change = Estimate(math.exp(change.mean), low, high, change.n)
    return replace(made, change=change, p=p)


def _exp(value: float) -> float | None:
    return math.exp(value) if value < MAX_LOG else None


class _Values(NamedTuple):
    """Values of both runs, pair by pair where they are paired.

    Attributes:
        sides: The values of each run.
        note: Remark on how they were obtained.
        missed: How many of each run are censored times.
    """

    sides: list[list[float]]
    note: str = ""
    missed: tuple[int, int] = (0, 0)


def _values(column: Column, rows: Sequence[Sequence[Row]], paired: bool) -> _Values:
    name, fold = column.name, column.fold
    if isinstance(fold, RestrictedMean):
        times = [event_times(run, name, fold.limit) for run in rows]
        if times[0] is None or times[1] is None:
            note = "the time for which a replicate was observed is not known"
            return _Values([[], []], note)
        both = [*times[0], *times[1]]
        cut = restriction(both)
        if all(time.censored for time in both):
            return _Values([[], []], "no replicate reached it")
        ours, theirs = (sum(time.censored for time in run) for run in (times[0], times[1]))
        unit = f" {column.unit}" if column.unit else ""
        failed = sum(math.isinf(time.seconds) for time in both)
        missed = f"missed it{' or failed' if failed else ''}"
        note = f"values cut at {cut:.4g}{unit}: {ours + theirs} of {len(both)} {missed}"
        sides = [restricted(run, cut) for run in (times[0], times[1])]
        return _Values(sides, note if ours + theirs else "", (ours, theirs))
    found = [[_number(row, name) for row in run] for run in rows]
    every = [value for side in found for value in side]
    if every.count(None) == len(every):
        return _Values([[], []])
    if any(some_censored(column, run) for run in rows):
        return _Values([[], []], CENSORED)
    if paired:
        whole = [pair for pair in zip(*found, strict=True) if None not in pair]
        sides = [
            [value for value in side if value is not None] for side in zip(*whole, strict=True)
        ]
        left = len(found[0]) - len(whole)
        note = f"{count_text(left, 'pair')} without a value left out" if left else ""
        return _Values(sides or [[], []], note)
    failed = sum(row["state"] not in FINISHED for run in rows for row in run)
    left = every.count(None) - failed  # the failed ones are counted below the table
    note = f"{count_text(left, 'replicate')} without a value left out" if left else ""
    return _Values([[value for value in side if value is not None] for side in found], note)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name) if row["state"] in FINISHED else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _paired(
    ours: Sequence[float], theirs: Sequence[float], column: Column
) -> tuple[Estimate, float | None]:
    """Return the mean difference of pairs with Student's t-interval, and the p-value of no change.

    Differences that agree exactly may do so by chance: they have no interval, unless the column is
    exact or there is no difference at all.
    """
    differences = [b - a for a, b in zip(ours, theirs, strict=True)]
    change = estimate(differences)
    assert change is not None
    if len(differences) < 2:
        return change, None
    if min(differences) == max(differences):
        if column.exact or change.mean == 0:
            return change, None
        return Estimate(change.mean, None, None, change.n), None
    from scipy.stats import ttest_1samp  # takes long to import

    return change, float(ttest_1samp(differences, 0.0).pvalue)


def _unpaired(
    ours: Sequence[float], theirs: Sequence[float], column: Column
) -> tuple[Estimate, float | None]:
    """Return the difference of means with Welch's t-interval, and the p-value of no change.

    Values that agree exactly in each run are treated as in :func:`_paired`.
    """
    means = [sum(side) / len(side) for side in (ours, theirs)]
    n, change = min(len(ours), len(theirs)), means[1] - means[0]
    varies = any(min(side) < max(side) for side in (ours, theirs))
    if n > 1 and not varies and (column.exact or change == 0):
        return Estimate(change, change, change, n), None
    if n < 2 or not varies:
        return Estimate(change, None, None, n), None
    from scipy.stats import ttest_ind  # takes long to import

    found = ttest_ind(theirs, ours, equal_var=False)
    interval = found.confidence_interval(CONFIDENCE)
    return Estimate(change, float(interval.low), float(interval.high), n), float(found.pvalue)


def _corrected(rows: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return comparisons with adjusted p-values and verdicts. An exact change needs no test."""
    import numpy as np

    raw = np.array([math.nan if row.p is None else row.p for row in rows])
    adjusted = [None if math.isnan(p) else float(p) for p in holm(raw)]
    corrected = (replace(row, p_holm=p) for row, p in zip(rows, adjusted, strict=True))
    return tuple(replace(row, verdict=_verdict(row)) for row in corrected)


def _verdict(row: Comparison) -> Verdict:
    if row.change is None:
        return "not known"
    none = 1.0 if row.ratio else 0.0
    if row.change.low == row.change.high == none:
        return "equal"
    certain = row.change.low is not None and row.change.low == row.change.high
    if not certain and (row.p_holm is None or row.p_holm > 1 - CONFIDENCE):
        return "not separable"
    grew = row.change.mean > none
    if row.column.better is None:
        return "larger" if grew else "smaller"
    return "better" if grew == (row.column.better == "maximize") else "worse"
