"""First section of the report: the recommendation in words, its certainty and its cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rayhive.columns import Row, conditions, find_column
from rayhive.metrics.aggregate import rows_by
from rayhive.metrics.folds import Percentile, RestrictedMean
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.advice import NAMED, percent_text
from rayhive.report.baselines import baseline_lines
from rayhive.report.numbers import number_text
from rayhive.report.page.conditions import scenario_text
from rayhive.report.page.front import objective_text
from rayhive.report.page.run_data import RunData
from rayhive.report.page.training import Setting, enqueue_text, settings
from rayhive.report.recommendation import (
    LEAD,
    LIKELY,
    MARGIN,
    SURE,
    Candidate,
    Ratio,
    Recommendation,
)
from rayhive.report.table import bound_text
from rayhive.report.table_notes import count_text

#: Level of certainty in a few words.
WORDS = {
    "sure": "sure",
    "likely": "likely",
    "lead": "a lead",
    "open": "it can't be told",
    "none": "nothing to choose from",
}
#: Rounds of a replicate below which the report says how much one of them counts.
FEW_ROUNDS = 20
#: Columns of the summary of the faults.
FAULT_COLUMNS = (
    "faults_planned",
    "faults_fired",
    "faults_verified",
    "detect_p95_s",
    "recover_p95_s",
    "rejoin_p95_s",
    "goodput",
    "retention",
    "samples_lost",
    "invariants_violated",
)


@dataclass(frozen=True)
class Cost:
    """Objective of the recommended configuration.

    Attributes:
        about: The objective in words.
        text: Its value with interval and unit.
    """

    about: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """Recommendation under one set of conditions, in words.

    Attributes:
        conditions: The conditions; empty if the run has only one set.
        use: Configuration that is recommended or ahead; empty for none.
        short: Its certainty in a few words.
        headline: The recommendation in one sentence.
        level: ``sure``, ``likely``, ``lead``, ``open`` or ``none``.
        certainty: The certainty, and the replicates behind it.
        costs: Objectives of the recommended configuration.
        settings: Its settings, of the axes that apply to it.
        enqueue: Line of a study with which one trains with them.
        limits: Limits of its replicates, in sentences.
        against: Comparisons in sentences.
        others: Label, share and ratios of every other candidate.
        left_out: Label and reason of the rows that are not candidates.
    """

    conditions: str
    use: str
    short: str
    headline: str
    level: str
    certainty: str
    costs: tuple[Cost, ...]
    settings: tuple[Setting, ...]
    enqueue: str
    limits: tuple[str, ...]
    against: tuple[str, ...]
    others: tuple[tuple[str, str, tuple[str, ...]], ...]
    left_out: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RobustChoice:
    """Configuration with the smallest regret over the scenarios of one place.

    Attributes:
        place: Conditions other than the scenario; empty if the run has only one set.
        use: The configuration.
        cost: Its regret and its worst value, in words.
    """

    place: str
    use: str
    cost: str


@dataclass(frozen=True)
class FaultSummary:
    """Summary of the faults of a run.

    Attributes:
        columns: Names of the columns.
        rows: Label and texts of each row with faults.
        left_out: Labels of the rows of which no replicate finished.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    left_out: tuple[str, ...]


def verdicts(run: RunData) -> list[Verdict]:
    """Return the recommendations in words, one for each set of conditions."""
    return [
        _verdict(advice, _conditions(run, rows[0]), _baselines(run, advice))
        for advice, rows in zip(run.advice, run.groups, strict=True)
        if advice is not None
    ]


def _conditions(run: RunData, row: Row) -> str:
    """Return the conditions of a row that differ within the run, with the faults in words."""
    others = run.condition_text(row, without=("scenario",))
    if others == run.condition_text(row):
        return others
    return ", ".join(filter(None, (others, scenario_text(run, row))))


def _baselines(run: RunData, advice: Recommendation) -> tuple[str, ...]:
    """Return comparisons of the recommended configuration with the baselines."""
    return () if advice.row is None else tuple(baseline_lines(run.results, advice.row))


def robust_choices(run: RunData) -> list[RobustChoice]:
    """Return the configuration with the smallest regret for each place with several scenarios.

    A place is a set of conditions other than the scenario, for example a link.
    """
    rows = [row for row in run.results.folded if isinstance(row.get("regret"), (int, float))]
    places = [name for name in conditions() if name != "scenario"]
    found = []
    for group in rows_by(rows, places):
        scenarios = {row["scenario"] for row in group}
        if len(scenarios) > 1 and len({row["configuration"] for row in group}) > 1:
            best = min(group, key=lambda row: float(row["regret"] or 0))
            name = next(iter(run.results.objectives))
            unit = _unit(name)
            regret, worst = (objective_text(best, each) for each in ("regret", "worst_case"))
            text = f"its mean {name} is never more than {regret}{unit} worse than the best one"
            if best["regret"] == 0:
                text = f"its mean {name} is the best one under each scenario"
            text += (
                f", and {worst}{unit} under its worst scenario (interval over all scenarios). "
                f"{len({row['configuration'] for row in group})} configurations have a value under "
                "every scenario"
            )
            where = run.condition_text(best, without=("scenario",))
            found.append(RobustChoice(where, str(best["configuration"]), text))
    return found


def rule_text(objectives: Mapping[str, str]) -> str:
    """Return the rule of the recommendation in words."""
    names = list(objectives)
    goal = {"minimize": "lowest", "maximize": "highest"}
    if len(names) == 1:
        return f"the {goal[objectives[names[0]]]} {names[0]}"
    first = f"within {100 * MARGIN:.0f} % of the {goal[objectives[names[0]]]} {names[0]}"
    middle = [f"then of the {goal[objectives[name]]} {name}" for name in names[1:-1]]
    last = f"the {goal[objectives[names[-1]]]} {names[-1]}"
    return f"of the configurations {', '.join([first, *middle])}, the one with {last}"


def _verdict(advice: Recommendation, conditions: str, baselines: tuple[str, ...]) -> Verdict:
    left_out = tuple((str(row["configuration"]), reason) for row, reason in advice.left_out)
    row = advice.row
    if row is None:
        headline = "No recommendation: no configuration has every objective."
        return Verdict(conditions, "", "", headline, "none", "", (), (), "", (), (), (), left_out)
    level, headline, certainty = _certainty(advice, str(row["configuration"]))
    share = "" if advice.certainty is None else f", {percent_text(advice.certainty)}"
    return Verdict(
        conditions,
        str(row["configuration"]),
        f"{WORDS[level]}{share}",
        headline,
        level,
        certainty,
        tuple(Cost(_about(name), _with_unit(row, name)) for name in advice.objectives),
        tuple(settings(row)),
        enqueue_text(row),
        tuple(_limits(row, advice.objectives)),
        (*_comparisons(advice), *baselines),
        tuple(_other(candidate, advice) for candidate in advice.candidates[1:]),
        left_out,
    )


def _certainty(advice: Recommendation, label: str) -> tuple[str, str, str]:
    """Return the level, the headline and the certainty in words."""
    if len(advice.candidates) == 1:
        return "none", f"{label} is the only configuration with all objectives.", ""
    if advice.certainty is None:
        return (
            "open",
            f"{label} is ahead; how sure that is cannot be computed.",
            (
                "The replicates show no spread, from which it would follow. "
                "More replicates can show one: --set replicates=3."
            ),
        )
    seeds = count_text(advice.seeds, "common seed" if advice.paired else "replicate")
    basis = (
        f"That is the probability that it is the choice of the rule below, given {seeds} of "
        f"{len(advice.candidates)} configurations. It covers chance between replicates, and no "
        "other machine, model or link."
    )
    if advice.certainty >= SURE:
        return "sure", f"Use {label}.", f"Sure: {percent_text(advice.certainty)}. {basis}"
    if advice.certainty >= LIKELY:
        return "likely", f"Use {label}.", f"Likely: {percent_text(advice.certainty)}. {basis}"
    among = " ".join(_open_choice(advice))
    if advice.certainty >= LEAD:
        words = f"A lead, not more: {percent_text(advice.certainty)}. {basis} {among}"
        return "lead", f"{label} leads.", words
    headline = f"It can't be told yet. {label} is slightly ahead."
    return "open", headline, f"Open: {percent_text(advice.certainty)}. {basis} {among}"


def _open_choice(advice: Recommendation) -> Iterator[str]:
    """Yield sentences about the configurations among which the choice lies."""
    possible = advice.possible
    named = [
        f"{each.row['configuration']} ({percent_text(each.share or 0.0)})"
        for each in possible[:NAMED]
    ]
    more = f" and {len(possible) - NAMED} more" if len(possible) > NAMED else ""
    total = len(advice.candidates)
    yield f"The choice lies among {len(possible)} of {total}: {', '.join(named)}{more}."
    ranges = []
    for name in advice.objectives:
        values = [float(each.row[name] or 0) for each in possible]
        ends = f"{number_text(min(values))} to {number_text(max(values))}"
        ranges.append(f"{name} from {ends}{_unit(name)}")
    yield f"Any of them has {' and '.join(ranges)}."
    yield "“rayhive plan FILE --difference 10%” says how many replicates would tell."


def _about(name: str) -> str:
    column = find_column(name)
    return name if column is None or column.about == name else f"{column.about} ({name})"


def _unit(name: str) -> str:
    """Return the unit of a column after a space; empty without one."""
    column = find_column(name)
    return f" {column.unit}" if column is not None and column.unit else ""


def _with_unit(row: Row, name: str) -> str:
    return f"{objective_text(row, name)}{_unit(name)}"


def _limits(row: Row, objectives: Iterable[str]) -> Iterator[str]:
    """Yield the limits of a row's replicates: few rounds, and faults that did not fire."""
    columns = [find_column(name) for name in objectives]
    to_target = any(each is not None and isinstance(each.fold, RestrictedMean) for each in columns)
    rounds, n, samples, needed = (
        float(row[name] or 0) for name in ("rounds", "n", "samples", "samples_to_target")
    )
    if to_target and rounds and samples and needed:
        to_it = rounds / n * needed / samples
        if to_it < FEW_ROUNDS:
            yield (
                f"It reaches the target after {to_it:.3g} rounds on average, so that one round "
                f"more or less changes the time to it by {100 / to_it:.0f} %."
            )
    planned, fired = (int(row[name] or 0) for name in ("faults_planned", "faults_fired"))
    if fired < planned:
        yield (
            f"Of the {planned} faults planned for its replicates {fired} fired before training "
            "ended: it is measured under those only."
        )


def _comparisons(advice: Recommendation) -> Iterator[str]:
    """Yield comparisons with the best configuration in each objective, and the plain one."""
    chosen = advice.candidates[0]
    rivals = advice.candidates[1:]
    told: set[int] = set()
    for name, way in advice.objectives.items():
        sign = 1 if way == "minimize" else -1
        best = min(advice.candidates, key=lambda each: sign * float(each.row[name] or 0))
        if best is not chosen and id(best) not in told:
            told.add(id(best))
            goal = "lowest" if way == "minimize" else "highest"
            yield f"Against {best.row['configuration']}, the {goal} {name}: {_ratios(best)}."
    plain = next((each for each in rivals if _is_plain(each.row)), None)
    if plain is not None and id(plain) not in told:
        yield f"Against {plain.row['configuration']}, without compression: {_ratios(plain)}."


def _is_plain(row: Row) -> bool:
    settings: dict[str, Any] = {"codec": "none", "powersgd_rank": None, "delay": "none"}
    return all(row.get(name) == value for name, value in settings.items())


def _ratios(candidate: Candidate) -> str:
    return ", ".join(f"{name} {_ratio(each)}" for name, each in candidate.against.items())


def _ratio(ratio: Ratio) -> str:
    sign = "×" if ratio.relative else ""
    value = f"{ratio.value:.3g}" if ratio.relative else f"{ratio.value:+.3g}"
    if ratio.low is None or ratio.high is None:
        return f"{sign} {value}".strip()
    doubt = "" if ratio.certain else ", may be equal"
    return f"{sign} {value} ({ratio.low:.3g} to {ratio.high:.3g}{doubt})".strip()


def _other(candidate: Candidate, advice: Recommendation) -> tuple[str, str, tuple[str, ...]]:
    share = "not known" if candidate.share is None else percent_text(candidate.share)
    label = str(candidate.row["configuration"])
    return label, share, tuple(_ratio(candidate.against[name]) for name in advice.objectives)


def fault_summary(run: RunData) -> FaultSummary | None:
    """Return the summary of the faults; None for a run without any."""
    rows = [row for row in run.results.folded if row["scenario"] != NO_FAULTS]
    if not rows:
        return None
    found, left_out = [], []
    for row in rows:
        label = f"{row['configuration']} · {run.condition_text(row) or row['scenario']}"
        if row["n"]:
            found.append((label, tuple(_fault_text(row, name) for name in FAULT_COLUMNS)))
        else:
            left_out.append(label)
    return FaultSummary(FAULT_COLUMNS, tuple(found), tuple(left_out))


def _fault_text(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, (int, float)):
        return number_text(float(f"{value:.4g}") if isinstance(value, float) else value)
    column = find_column(name)
    of_times = column is not None and isinstance(column.fold, Percentile)
    if of_times and row["faults_fired"] is not None:
        return bound_text(row, name) or "no case"
    return "not recorded"
