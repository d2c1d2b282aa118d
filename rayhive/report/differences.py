"""Paired differences of every row to a baseline row, at equal seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rayhive.columns import Column, Row, find_column, group_columns
from rayhive.errors import Problem, unknown
from rayhive.metrics.aggregate import comparable, is_censored, ran
from rayhive.metrics.seeds import differences, holm, seed_values
from rayhive.report.numbers import estimate_text, interval_text
from rayhive.report.results import Results
from rayhive.report.table import EMPTY, Cell, TableModel, key_columns, missed_text
from rayhive.report.table_notes import count_text

#: Name of the baseline that stands for the first row under each condition.
FIRST = "first"
#: Mark of a factor of times of which some are cut.
CUT = " (cut)"
#: Columns that are compared in a run without objectives.
_WITHOUT_OBJECTIVES = ("final_loss", "samples_per_s")
#: Adjusted p-value up to which a difference is significant.
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Difference:
    """Difference of one row to its baseline in one column.

    Attributes:
        row: The row.
        baseline: The baseline row.
        column: The column.
        pairs: Number of common seeds.
        value: Mean difference; the factor row / baseline if ``log``. None without common seeds.
        low: Lower end of its 95 % interval (Student's t for pairs); None if the spread of the pairs
            is not known.
        high: Upper end.
        p: Two-sided p-value, with Holm's adjustment over all rows and columns that are compared
            under the same conditions; None if the spread is not known.
        log: Whether the values are factors.
    """

    row: Row
    baseline: Row
    column: str
    pairs: int
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    log: bool

    @property
    def significant(self) -> bool:
        """Whether the rows differ at 5 %, all comparisons taken together."""
        return self.p is not None and self.p <= SIGNIFICANCE

    def record(self, keys: Iterable[str] = ()) -> Row:
        """Return the difference as a flat row, with further columns that identify its row."""
        names = dict.fromkeys(("configuration", "scenario", *keys))
        return {name: self.row[name] for name in names} | {
            "baseline": self.baseline["configuration"],
            "column": self.column,
            "scale": "factor" if self.log else "difference",
            "pairs": self.pairs,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "p_adjusted": self.p,
        }


def versus_problems(results: Results, versus: str, columns: Sequence[str]) -> Iterator[Problem]:
    """Yield the mistakes in the name of a baseline and in the columns to compare."""
    labels = list(dict.fromkeys(name for row in results.folded for name in _names(row)))
    if versus not in (FIRST, *labels):
        yield unknown("--versus", versus, [FIRST, *labels])
    for name in columns:
        column = find_column(name)
        if column is not None and (not column.interval or column.stage == "run"):
            allowed = "a column of replicates with an interval, such as an objective"
            yield Problem("--columns", name, allowed, None)


def all_differences(
    results: Results, versus: str = FIRST, columns: Sequence[str] = ()
) -> list[Difference]:
    """Return the differences of all rows to the baseline row under the same conditions.

    Times that a replicate of one of the two did not see are cut at the same time in both
    (:class:`rayhive.metrics.folds.RestrictedMean`).

    Args:
        results: The results.
        versus: Configuration of the baseline; ``first`` for the first row of each condition.
        columns: Columns to compare; by default the objectives.
    """
    names = tuple(columns or results.objectives or _WITHOUT_OBJECTIVES)
    left, found = list(results.folded), list[Difference]()
    while left:
        group = [row for row in left if comparable(left[0], row)]
        left = [row for row in left if not comparable(left[0], row)]
        base = next((r for r in group if versus in (FIRST, *_names(r))), None)
        if base is not None:
            family = [
                _difference(row, base, name) for row in group if row is not base for name in names
            ]
            found += _adjusted(family)
    return found


def _names(row: Row) -> list[str]:
    """Return the names of a row as a baseline: its label, and that of a baseline of the study."""
    return [str(row[name]) for name in ("configuration", "baseline") if row[name] is not None]


def differences_to(row: Row, base: Row, columns: Sequence[str]) -> list[Difference]:
    """Return the differences of one row to another, with Holm's adjustment over the columns."""
    return list(_adjusted([_difference(row, base, name) for name in columns]))


def _difference(row: Row, base: Row, name: str) -> Difference:
    values = seed_values([row, base], name)
    pair = differences(values, 0)
    log, pairs = values.column.log, int(pair.pairs[1])
    mean, half = float(pair.mean[1]), float(pair.half_widths()[1])
    value, low, high = (_shown(mean + end * half if end else mean, log) for end in (0, -1, 1))
    p = float(pair.p_values()[1])
    return Difference(row, base, name, pairs, value, low, high, None if math.isnan(p) else p, log)


def _shown(value: float, log: bool) -> float | None:
    if math.isnan(value) or (log and value > 700):
        return None
    return math.exp(value) if log else value


def _adjusted(family: Sequence[Difference]) -> Iterator[Difference]:
    import numpy as np

    raw = np.array([math.nan if each.p is None else each.p for each in family])
    for each, p in zip(family, holm(raw).tolist(), strict=True):
        yield replace(each, p=None if math.isnan(p) else p)


def difference_table(
    results: Results, versus: str = FIRST, columns: Sequence[str] = ()
) -> TableModel:
    """Return the differences as a table: a row for each row, a column for each compared one."""
    found = all_differences(results, versus, columns)
    names = list(dict.fromkeys(each.column for each in found))
    rows = list({id(each.row): each.row for each in found}.values())
    cells = {(id(each.row), each.column): each for each in found}
    keys = key_columns(results, results.folded)
    shown = [_heading(name, found) for name in names]
    pairs = replace(group_columns("replication")[0], name="pairs", about="Common seeds", unit="")
    lines = []
    for row in rows:
        texts = (row.get(column.name) for column in keys)
        line = [Cell(EMPTY if text is None else str(text)) for text in texts]
        line += [_cell(cells[id(row), name]) for name in names]
        fewest = min((cells[id(row), name].pairs for name in names), default=0)
        lines.append((*line, Cell(f"{fewest}/{ran(row)}")))
    bases = list(dict.fromkeys(str(each.baseline["configuration"]) for each in found))
    return TableModel(
        title=f"{results.name}: {count_text(len(rows), 'row')} against {' | '.join(bases) or '-'}",
        columns=(*keys, *shown, pairs),
        keys=len(keys),
        rows=tuple(lines),
        notes=tuple(_notes(found)),
        brief=True,
        best_note=(
            "differs from the baseline at 5 % (Student's t for pairs, Holm over all comparisons "
            "under the same conditions)."
        ),
    )


def _heading(name: str, found: Sequence[Difference]) -> Column:
    column = _column(name)
    log = any(each.log for each in found if each.column == name)
    return replace(column, unit="factor" if log else column.unit, group=column.group)


def _cell(found: Difference) -> Cell:
    return Cell(difference_text(found), found.value is not None and found.significant)


def difference_text(found: Difference) -> str:
    """Return a difference with its interval: ``+3.1 ± 0.4``, or ``× 1.3 [1.1, 1.5]`` of factors."""
    if found.value is None:
        return EMPTY
    if found.log:
        cut = CUT if _cut(found) else ""
        return f"× {interval_text(found.value, found.low, found.high)}{cut}"
    half = None if found.high is None else found.high - found.value
    text = estimate_text(found.value, half)
    return text if found.value < 0 else f"+{text}"


def _cut(found: Difference) -> bool:
    return any(
        is_censored(row, found.column) or missed_text(row, _column(found.column)) is not None
        for row in (found.row, found.baseline)
    )


def _column(name: str) -> Column:
    column = find_column(name)
    assert column is not None
    return column


def _notes(found: Sequence[Difference]) -> Iterator[str]:
    if not found:
        yield "No row has a baseline under the same conditions."
        return
    yield (
        "Each cell is row less baseline, of times and ratios row / baseline (×), with its 95 % "
        "interval over the pairs of equal seeds."
    )
    if any(_cut(each) for each in found):
        yield (
            "(cut): some replicates missed the target or failed; times are cut at the end of the "
            "shortest that missed it, in both rows, which draws the factor towards 1."
        )
    untested = [each for each in found if each.p is None and each.value is None]
    if untested:
        yield f"{count_text(len(untested), 'comparison')} without values at a common seed."
    alike = [each for each in found if each.value is not None and not each.significant]
    if alike:
        verb = "does" if len(found) == 1 else "do"
        yield (
            f"{len(alike)} of {count_text(len(found), 'comparison')} {verb} not differ "
            "significantly: that is no proof of equality. `rayhive plan FILE --difference` says "
            "how many replicates would tell."
        )
