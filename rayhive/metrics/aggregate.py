"""From rows of replicates to rows of the results table."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rayhive.columns import BY_NAME, COLUMNS, CONFIGURATION, FOLDED_ONLY, Column
from rayhive.metrics.faults import TIMES, percentiles, text_times
from rayhive.metrics.group import Row, Value
from rayhive.metrics.refusals import add_counts
from rayhive.metrics.stats import estimate
from rayhive.metrics.timeline import FINISHED, LOST, UNCOUNTED

#: Replicates under different conditions are never folded into one row.
CONDITIONS: tuple[str, ...] = ("scenario", "workload", "code", "peers", "link")
#: What makes two replicates one row. ``data`` is left out: a replicate that failed early does not
#: know it.
KEY: tuple[str, ...] = (
    *(column.name for column in CONFIGURATION if column.name != "data"),
    "code",
)
#: Columns that ``columns.py`` does not have.
EXTRA_COLUMNS: tuple[str, ...] = (
    "n_timed_out",
    "rounds_complete",
    "payload_matches",
    "live_share",
    *(f"{name}_s" for name in TIMES),
)
#: Counts of which a row has the sum over its replicates.
ADDED_UP: tuple[str, ...] = (
    "rounds",
    "rounds_failed",
    "rounds_partial",
    "rejected",
    "faults_planned",
    "faults_fired",
    "faults_verified",
    "censored",
    "samples_lost",
    "state_transfer_bytes",
    "invariants_violated",
)
#: Times and counts that are only known of replicates that reached the target.
CENSORED: tuple[str, ...] = ("time_to_target_s", "samples_to_target")
#: Differences of such counts: of those who got there, none is a bound for all.
WHOLE: tuple[str, ...] = ("convergence_penalty",)


def fold(rows: Iterable[Row], by: Sequence[str] = ()) -> list[Row]:
    """Fold replicates into one row per configuration and scenario.

    ``n`` counts the replicates that finished (completed or timed out) and every number is of
    those; ``n_failed`` counts those that ended in any other way (diverged, failed, invalid), and
    ``n_lost`` those that the infrastructure lost, which is not the configuration's doing;
    ``n_timed_out`` says how many of the ``n`` were ended by the time limit. Stopped and
    unfinished replicates say nothing about a configuration and count nowhere.

    Numbers become means with 95 % intervals (:func:`rayhive.metrics.stats.estimate`) in ``NAME``,
    ``NAME_low`` and ``NAME_high``; rounds, refusals, faults and lost samples are added up; of
    ``weights_distance_max`` the largest stays; ``reached`` counts; the percentiles of ``detect``,
    ``stall``, ``recover`` and ``rejoin`` are over the faults of all replicates together; texts are
    kept where equal and joined where not; a yes-or-no is yes if it is for all. Where not all
    replicates, those that failed among them, reached the target, ``time_to_target_s`` and
    ``samples_to_target`` are means over those that did, without an interval: they are lower
    bounds. Measured numbers that agree exactly have no interval either: that they are whole
    numbers, or sampled coarsely, does not make the mean certain.

    Args:
        rows: What :func:`rayhive.metrics.rows.timeline_row` returned, each replicate once.
        by: Columns of the configuration group: replicates that agree in these (and in scenario,
            workload, peers and link) make one row, whatever their other settings. By default all.

    Returns:
        Rows in the order in which their first replicate appears.
    """
    key = tuple(dict.fromkeys((*by, *CONDITIONS))) if by else KEY
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["state"] not in UNCOUNTED:
            groups[json.dumps([row.get(name) for name in key])].append(row)
    return [_fold_group(group, key) for group in groups.values()]


def _fold_group(rows: list[Row], key: Sequence[str]) -> Row:
    finished = [row for row in rows if row["state"] in FINISHED]
    lost = sum(row["state"] == LOST for row in rows)
    folded: Row = {}
    for column in COLUMNS:
        name = column.name
        if name in FOLDED_ONLY:
            folded[name] = None
            continue
        if column.group in ("configuration", "provenance"):
            fold_all = _FOLDS.get(name)
            folded[name] = fold_all(_values(rows, name)) if fold_all else _same(rows, name)
        elif name in WHOLE and len(_values(finished, name)) < len(rows):
            folded[name] = None
        elif column.interval:
            folded.update(_estimates(finished, column, len(rows)))
        else:
            folded[name] = _FOLDS.get(name, _mean)(_values(finished, name))
    folded |= {
        "n": len(finished),
        "n_failed": len(rows) - len(finished) - lost,
        "n_lost": lost,
        "n_timed_out": sum(row["state"] == "timed_out" for row in finished),
        "rounds_complete": _sum(_values(finished, "rounds_complete")),
        "payload_matches": _all(_values(finished, "payload_matches")),
        "live_share": _mean(_values(finished, "live_share")),
    }
    for name in TIMES:  # percentiles are over the faults of all replicates together
        folded |= percentiles(name, text_times(_values(finished, f"{name}_s")))
    return folded


def _values(rows: Iterable[Row], name: str) -> list[Any]:
    return [row[name] for row in rows if row[name] is not None]


def _estimates(rows: list[Row], column: Column, ran: int) -> Row:
    """Return a mean with its interval.

    Replicates that agree exactly have an interval (without width) only in a column that is exact,
    and only if they sent what was predicted.

    Args:
        rows: Replicates that finished.
        column: The column.
        ran: Number of replicates, those that failed included.
    """
    name = column.name
    values = _values(rows, name)
    found = estimate(values)
    if found is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    known = name not in CENSORED or len(values) == ran
    if found.low == found.high:
        known = known and column.exact and _all(_values(rows, "payload_matches")) is True
    return {
        name: found.mean,
        f"{name}_low": found.low if known else None,
        f"{name}_high": found.high if known else None,
    }


def _same(rows: list[Row], name: str) -> Value:
    """Keep what all agree on and list differing texts; differing numbers have nothing to say."""
    distinct = {row[name] for row in rows}
    if len(distinct) == 1:
        return distinct.pop()
    return "; ".join(sorted(item for item in distinct if isinstance(item, str))) or None


def _mean(values: list[Any]) -> Value:
    found = estimate(values)
    return None if found is None else found.mean


def _sum(values: list[Any]) -> Value:
    return sum(values) if values else None


def _all(values: list[Any]) -> Value:
    return all(values) if values else None


_FOLDS: dict[str, Callable[[list[Any]], Value]] = {
    **dict.fromkeys(("reached", *ADDED_UP), _sum),
    "rejected_peers": add_counts,
    "weights_distance_max": lambda values: max(values, default=None),
    "started": lambda values: min(values, default=None),
    "ended": lambda values: max(values, default=None),
}


def ran(row: Row) -> int:
    """Return how many replicates a folded row stands for, those that failed included."""
    return int(row["n"] or 0) + int(row["n_failed"] or 0)


def is_censored(row: Row, name: str) -> bool:
    """Return whether a folded time to the target is known of only some of its row's replicates."""
    reached = row["reached"]
    return name in CENSORED and reached is not None and reached != ran(row)


def objectives_known(row: Row, objectives: Iterable[str]) -> bool:
    """Return whether a folded row has every objective, of all its replicates.

    It has none of a replicate that failed, so a row with such has not.
    """
    return not row["n_failed"] and all(
        name in BY_NAME and row[name] is not None and not is_censored(row, name)
        for name in objectives
    )
