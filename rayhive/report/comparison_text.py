"""Comparison of two runs as rows of text and as objects."""

from __future__ import annotations

from typing import Any

from rayhive.report.comparison import Comparison, Comparisons
from rayhive.report.numbers import number_text
from rayhive.report.table_notes import count_text


def comparison_rows(found: Comparisons) -> list[dict[str, Any]]:
    """Return a row for each comparison, with numbers in full precision."""
    return [
        {
            "configuration": row.configuration,
            "scenario": row.scenario,
            "column": row.column.name,
            "a": row.a,
            "b": row.b,
            "a_censored": row.censored[0],
            "b_censored": row.censored[1],
            "change": "ratio" if row.ratio else "difference",
            "value": None if row.change is None else row.change.mean,
            "low": None if row.change is None else row.change.low,
            "high": None if row.change is None else row.change.high,
            "n": row.n,
            "paired": row.paired,
            "p": row.p,
            "p_holm": row.p_holm,
            "verdict": row.verdict,
            "note": row.note,
        }
        for row in found.rows
    ]


def comparison_texts(found: Comparisons) -> list[dict[str, str]]:
    """Return a row of short texts for each comparison."""
    return [
        {
            "configuration": row.configuration,
            "scenario": row.scenario,
            "column": f"{row.column.name} ({row.column.unit})"
            if row.column.unit
            else row.column.name,
            "a": _text(row.a, row.censored[0]),
            "b": _text(row.b, row.censored[1]),
            "change": change_text(row),
            "n": count_text(row.n, "pair") if row.paired else f"{row.n} each",
            "p": "" if row.p_holm is None else f"{row.p_holm:.2g}",
            "verdict": row.verdict + (f" ({row.note})" if row.note else ""),
        }
        for row in found.rows
    ]


def change_text(row: Comparison) -> str:
    """Return the change with its interval: ``× 1.2 (1.1 to 1.3)`` or ``+0.2 (-0.1 to 0.5)``."""
    if row.change is None:
        return ""
    mean, low, high = row.change.mean, row.change.low, row.change.high
    head = f"× {mean:.4g}" if row.ratio else f"{mean:+.4g}"
    return head if low is None or high is None else f"{head} ({low:.4g} to {high:.4g})"


def _text(value: float | None, censored: bool) -> str:
    return "" if value is None else f"{'≥ ' if censored else ''}{number_text(value)}"
