"""Rules by which the values of replicates become one value of the results table.

A :class:`~rayhive.columns.Column` names one of these rules. All but :class:`Common` and
:class:`Reduced` use the replicates that finished; cells that are None are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayhive.columns import Column, Fold, Replicates, Row, Value
from rayhive.metrics.stats import Time, estimate, known_percentile


def known(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the values of one column that are not None."""
    return [row[name] for row in rows if row[name] is not None]


@dataclass(frozen=True)
class Mean(Fold):
    """Arithmetic mean.

    Attributes:
        interval: Whether a 95 % interval is given (:func:`rayhive.metrics.stats.estimate`).
            Replicates that agree exactly have none, because measured values can agree by chance;
            unless the column is exact and every replicate sent the predicted payload.
        missing: Consequence of a replicate without a value, failed ones included. ``ignore``: none.
            ``bound``: the mean is a lower bound and has no interval. ``none``: there is no mean.
        survivors: Whether failed replicates would have worsened the mean, so that tables print the
            number of replicates that it is over.
    """

    interval: bool = False
    missing: Literal["ignore", "bound", "none"] = "ignore"
    survivors: bool = False
    type = "float"

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the mean and, where asked for, the bounds of its interval."""
        name, finished = column.name, replicates.finished
        values = known(finished, name)
        complete = len(values) == len(replicates.ran)
        found = estimate(values)
        if found is None or (self.missing == "none" and not complete):
            bounds = {f"{name}_low": None, f"{name}_high": None} if self.interval else {}
            return {name: None, **bounds}
        if not self.interval:
            return {name: found.mean}
        certain = self.missing != "bound" or complete
        if found.low == found.high:
            predicted = known(finished, "payload_matches")
            certain = certain and column.exact and bool(predicted) and all(predicted)
        return {
            name: found.mean,
            f"{name}_low": found.low if certain else None,
            f"{name}_high": found.high if certain else None,
        }


@dataclass(frozen=True)
class Total(Fold):
    """Sum.

    Attributes:
        share: Whether the column is a yes-or-no of each replicate, so that tables print the sum as
            a share of the replicates.
    """

    share: bool = False
    type = "count"

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the sum; None if no replicate has a value."""
        values = known(replicates.finished, column.name)
        return {column.name: sum(values) if values else None}


@dataclass(frozen=True)
class Reduced(Fold):
    """Result of a function of the values, of the type of the column.

    Attributes:
        function: The function, for example :func:`max`.
        failed: Whether replicates that failed count.
    """

    function: Callable[[list[Any]], Value]
    failed: bool = False

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the result; None if there are no values."""
        values = known(replicates.ran if self.failed else replicates.finished, column.name)
        return {column.name: self.function(values) if values else None}


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
    """

    of: str
    percent: float

    def __call__(self, column: Column, replicates: Replicates) -> Row:
        """Return the percentile [s]; None if it depends on how long a censored time lasted."""
        times = parse_times(known(replicates.finished, self.of))
        return {column.name: known_percentile(times, self.percent)}


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
