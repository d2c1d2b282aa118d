"""Sentences of the results table: which row to take, how sure that is, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayhive.columns import Row
from rayhive.metrics.stats import LEAST_BY_RANK
from rayhive.report.results import Results

#: Configurations that a sentence names.
NAMED = 3


def advice_lines(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each set of conditions: the row to take, or that it cannot be told.

    A sentence for each baseline follows.

    Args:
        results: The results.
        rows: Rows of the table, which may be fewer than those of the run.
    """
    from rayhive.report.baselines import baseline_lines
    from rayhive.report.recommendation import LIKELY, SURE, Recommendation, recommendations

    def place_of(advice: Recommendation) -> str:
        named = {name: v for name, v in advice.conditions.items() if name not in results.by}
        listed = ", ".join(f"{name} {value}" for name, value in named.items())
        return f" with {listed}" if listed else ""

    def sentence(advice: Recommendation) -> str:
        place = place_of(advice)
        if advice.row is None and not advice.left_out:
            return ""
        if advice.row is None:
            reasons = sorted({reason for _, reason in advice.left_out})
            return f"No row to take{place}: {'; '.join(reasons[:NAMED])}."
        best = _label(advice.row, results.by)
        if len(advice.candidates) == 1:
            others = len(advice.left_out)
            if not others:
                return ""  # nothing to choose from
            return f"Take {best}{place}: the only row of {others + 1} with every objective."
        rule = _rule(results)
        if advice.certainty is None:
            return (
                f"Cannot tell which row to take{place}: the replicates show no spread. "
                f"Measured as {rule}: {best}."
            )
        if advice.certainty >= LIKELY:
            sure = "sure" if advice.certainty >= SURE else "likely, not sure,"
            return f"Take {best}{place}: {percent_text(advice.certainty)} {sure} that it is {rule}."
        possible = [(_label(each.row, results.by), each.share or 0.0) for each in advice.possible]
        named = ", ".join(f"{name} ({percent_text(p)})" for name, p in possible[:NAMED])
        more = f" and {len(possible) - NAMED} more" if len(possible) > NAMED else ""
        return (
            f"Cannot tell which row to take{place}. Each of these may be {rule}: {named}{more}. "
            "`rayhive plan FILE --difference 10%` says how many replicates would tell."
        )

    if any(row["n"] for row in rows):
        for advice in recommendations(results):
            yield from filter(None, [sentence(advice)])
            if advice.row is not None:
                yield from baseline_lines(results, advice.row, place_of(advice))


def _rule(results: Results) -> str:
    from rayhive.report.recommendation import MARGIN

    goal = {"minimize": "lowest", "maximize": "highest"}
    *narrowing, last = [f"the {goal[way]} {name}" for name, way in results.objectives.items()]
    if not narrowing:
        return last
    within = " and of ".join(f"{each}" for each in narrowing)
    return f"the row with {last} within {percent_text(MARGIN)} of {within}"


def _label(row: Row, by: Sequence[str]) -> str:
    return ", ".join(f"{name} {row.get(name)}" for name in by) or str(row["configuration"])


def certainty_notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the meaning of the probabilities and comparisons, and the limits of few replicates."""
    judged = [row for row in rows if row["pareto_probability"] is not None]
    if judged:
        yield (
            "pareto_probability: that no other row is better in every objective, given the spread "
            "between replicates of equal seeds."
        )
    unclear = [row for row in rows if row["not_separable"]]
    if unclear:
        yield (
            "not_separable: rows from which no objective separates the row (paired t-tests over "
            "common seeds, Holm over all rows, 5 %); not_separable_from names them (--columns)."
        )
    counts = (int(row["n"] or 0) for row in rows if row["not_separable"] is not None)
    fewest = min(counts, default=None)
    if fewest is not None and 1 < fewest < LEAST_BY_RANK:
        yield (
            f"{fewest} replicates support no distribution-free claim at 5 % (it takes "
            f"{LEAST_BY_RANK}): all of this assumes normal values, of times and ratios normal "
            "logarithms."
        )


def percent_text(share: float) -> str:
    """Return a probability in percent; no probability is printed as 0 or 100 %."""
    if share >= 0.995:
        return "> 99 %"
    return "< 1 %" if share < 0.005 else f"{100 * share:.0f} %"
