"""Cells that hold several values as one text: times with their censoring, and counts by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rayhive.metrics.stats import Time


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
