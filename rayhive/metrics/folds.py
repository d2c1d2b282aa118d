"""Rules by which the values of replicates become one value of the results table.

A :class:`~rayhive.columns.Column` names one of these rules. All but :class:`Common`,
:class:`Reduced` and :class:`RestrictedMean` use the replicates that finished; cells that are None
are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayhive.columns import Column, Fold, Replicates, Row, Value
from rayhive.metrics.stats import (
    Estimate,
    Time,
    censored_percentile,
    estimate,
    known_percentile,
    log_estimate,
    median_interval,
)
from rayhive.spec.pruning import PRUNED
from rayhive.timeline import FINISHED, UNKNOWN


def known(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of one column that are not None."""
    return [row[name] for row in rows if row[name] is not None]


@dataclass(frozen=True)
class Mean(Fold):
    """Arithmetic mean, or the geometric mean of a column on a log scale.

    Attributes:
        interval: Whether a 95 % interval is given (:func:`rayhive.metrics.stats.estimate`).
            Replicates that agree exactly have none, because measured values can agree by chance;
            unless the column is exact and every replicate sent the predicted payload.
        log: Whether mean and interval are those of the logarithms
            (:func:`rayhive.metrics.stats.log_estimate`), as for times, rates and ratios.
        missing: Consequence of a replicate without a value, failed ones included. ``ignore``: none.
            ``none``: there is no mean.
        survivors: Whether failed replicates would have worsened the mean, so that tables print the
            number of replicates that it is over.
    """

    interval: bool = False
    missing: Literal["ignore", "none"] = "ignore"
    survivors: bool = False
    log: bool = False
    type = "float"

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the mean and, where asked for, the bounds of its interval."""
        name, finished = column.name, replicates.finished
        values = known(finished, name)
        complete = len(values) == sum(row["state"] not in UNKNOWN for row in replicates.ran)
        found = log_estimate(values) if self.log else estimate(values)
        if self.missing == "none" and not complete:
            found = None
        if not self.interval:
            return {name: None if found is None else found.mean}
        certain = found is None or found.low != found.high or is_exact(column, finished)
        return bounded(name, found, certain)


def is_exact(column: Column, finished: Iterable[Row]) -> bool:
    """Return whether equal replicates of a column are equal for a reason, not by chance."""
    predicted = known(finished, "payload_matches")
    return column.exact and bool(predicted) and all(predicted)


def bounded(name: str, found: Estimate | None, certain: bool = True) -> Row:
    """Return an estimate as a value with its bounds, which are None unless it is certain."""
    shown = found if certain else None
    return {
        name: None if found is None else found.mean,
        f"{name}_low": None if shown is None else shown.low,
        f"{name}_high": None if shown is None else shown.high,
    }


@dataclass(frozen=True)
class RestrictedMean(Fold):
    """Geometric mean of times to an event that some replicates may not have seen.

    A replicate that finished without the event was observed for a time, and its event came later.
    A replicate that failed will never see the event. A mean over the others alone would be that of
    the lucky ones, so every time is cut at τ, the shortest observation without the event: the value
    is the geometric mean of ``min(T, τ)`` over all replicates, with its interval on a log scale. It
    is a lower bound of the mean of T. If failed replicates alone lack the event, τ is the longest
    of the other times. The restricted mean is that of Royston and Parmar, BMC Medical Research
    Methodology 13 (2013), here of the logarithm. If every replicate saw the event, it is the
    geometric mean of the times.

    Attributes:
        limit: Column with the time for which a replicate was observed.
    """

    limit: str
    interval = True
    log = True
    type = "float"

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the restricted mean and its bounds; None if no replicate saw the event."""
        name = column.name
        times = event_times(replicates.ran, name, self.limit)
        if times is None or all(time.censored for time in times):
            return bounded(name, None)
        found = log_estimate(restricted(times, restriction(times)))
        return bounded(name, found, found is not None and found.low != found.high)


def event_times(rows: Iterable[Row], name: str, limit: str) -> list[Time] | None:
    """Return the times to an event, one for each replicate that was not lost or skipped.

    A replicate without the event, or one that was pruned, has the time for which it was observed,
    and one that failed an infinite time, all as censored. None if an observation time is not known.
    """
    times = []
    for row in rows:
        value = row[name] if row["state"] in FINISHED else math.inf
        if row["state"] in UNKNOWN:
            continue
        if row["state"] == PRUNED:
            value = None
        observed = row.get(limit) if value is None else value
        if not isinstance(observed, (int, float)):
            return None
        times.append(Time(observed, censored=value is None or value == math.inf))
    return times


def restriction(times: Iterable[Time]) -> float:
    """Return τ, up to which every time is known: the shortest censored time.

    Infinite if no time is censored; the longest known time if the censored ones are infinite.
    """
    times = list(times)
    cut = min((time.seconds for time in times if time.censored), default=math.inf)
    if cut < math.inf or not any(time.censored for time in times):
        return cut
    return max((time.seconds for time in times if not time.censored), default=math.inf)


def restricted(times: Iterable[Time], limit: float) -> list[float]:
    """Return the times, cut at a limit."""
    return [min(time.seconds, limit) for time in times]


@dataclass(frozen=True)
class Total(Fold):
    """Sum.

    Attributes:
        share: Whether the column is a yes-or-no of each replicate, so that tables print the sum as
            a share of the replicates.
        whole: Whether the sum is unknown if a value is.
    """

    share: bool = False
    whole: bool = False
    type = "count"

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the sum; None if no replicate has a value, or with ``whole`` not every one."""
        values = known(replicates.finished, column.name)
        lacking = self.whole and len(values) < len(replicates.finished)
        return {column.name: sum(values) if values and not lacking else None}


@dataclass(frozen=True)
class Reduced(Fold):
    """Result of a function of the values, of the type of the column.

    Attributes:
        function: The function, for example :func:`max`.
        failed: Whether replicates that failed count.
        whole: Whether the result is unknown if a value is.
    """

    function: Callable[[list[Any]], Value]
    failed: bool = False
    whole: bool = False

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the result; None if there are no values, or with ``whole`` not all of them."""
        rows = replicates.ran if self.failed else replicates.finished
        values = known(rows, column.name)
        lacking = self.whole and len(values) < len(rows)
        return {column.name: self.function(values) if values and not lacking else None}


@dataclass(frozen=True)
class Common(Fold):
    """Value that all replicates have, failed ones included.

    Differing texts are listed; differing numbers give None.
    """

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the common value."""
        distinct = {row[column.name] for row in replicates.ran}
        if len(distinct) == 1:
            return {column.name: distinct.pop()}
        texts = sorted(item for item in distinct if isinstance(item, str))
        return {column.name: "; ".join(texts) or None}


@dataclass(frozen=True)
class Percentile(Fold):
    """Percentile over the pooled times of another column.

    Attributes:
        of: Column with the times, folded by :func:`pool_times`.
        percent: Percentile, 0 to 100.
        interval: Whether a 95 % interval of the median is given. The replicates' own medians are
            the independent values (:func:`rayhive.metrics.stats.median_interval`); the interval is
            widened to the percentile of the pooled times if it does not contain that.
    """

    of: str
    percent: float
    interval: bool = False
    log = True

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the percentile [s]; None if it depends on how long a censored time lasted."""
        texts = known(replicates.finished, self.of)
        value = known_percentile(parse_times(texts), self.percent)
        if not self.interval:
            return {column.name: value}
        own = [censored_percentile(parse_times([text]), self.percent) for text in texts]
        low, high = median_interval([time for time in own if time is not None])
        if value is None:
            low = high = None
        return {
            column.name: value,
            f"{column.name}_low": low if low is None or value is None else min(low, value),
            f"{column.name}_high": high if high is None or value is None else max(high, value),
        }


def some_censored(column: Column, ran: Iterable[Row]) -> bool:
    """Return whether a replicate has no value because its measured time had not ended.

    The other replicates are the quick ones, and their values do not stand for all.
    """
    fold = column.fold
    if isinstance(fold, Percentile):
        timed = [row for row in ran if row["state"] in FINISHED and row.get(fold.of)]
        return any(row.get(column.name) is None for row in timed)
    if isinstance(fold, Mean) and fold.missing == "none":
        return any(row.get(column.name) is None for row in ran if row["state"] not in UNKNOWN)
    return False


@dataclass(frozen=True)
class Count(Fold):
    """Number of replicates in given states.

    Attributes:
        states: States that count, or with ``other`` the states that do not count.
        other: Whether all states except ``states`` count.
    """

    states: frozenset[str]
    other: bool = False

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the number of replicates."""
        inside = [row["state"] in self.states for row in replicates.ran]
        return {column.name: inside.count(not self.other)}


# -- cells that hold several values as one text -------------------------------------------------


def times_text(times: Iterable[Time]) -> str | None:
    """Return times as ``1.5 >2.0``, where ``>`` marks a censored time; None if there are none."""
    return " ".join(f"{'>' * time.censored}{time.seconds!r}" for time in times) or None


def parse_times(texts: Iterable[str]) -> list[Time]:
    """Return the times in several texts of :func:`times_text`, in order."""
    return [
        Time(float(item.removeprefix(">")), censored=item.startswith(">"))
        for text in texts
        for item in text.split()
    ]


def pool_times(texts: Iterable[str]) -> str | None:
    """Return the times in several texts of :func:`times_text` as one such text."""
    return times_text(parse_times(texts))


def counts_text(counts: Mapping[str, int]) -> str | None:
    """Return counts as ``peer-2 153, peer-0 1``, the largest first; None if there are none."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or None


def add_counts(texts: Iterable[str]) -> str | None:
    """Return the sums of the counts in several texts of :func:`counts_text`, as such a text."""
    total: Counter[str] = Counter()
    for text in texts:
        for item in text.split(", "):
            name, _, count = item.rpartition(" ")
            total[name] += int(count)
    return counts_text(total)
