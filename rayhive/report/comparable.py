"""Runs that can be compared: what they share, and why they cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rayhive.columns import Value
from rayhive.errors import Problem, unknown
from rayhive.metrics.stats import LEAST_BY_RANK
from rayhive.report.settings import Replicate, Settings, differing
from rayhive.report.table_notes import count_text
from rayhive.spec.axes import AXES
from rayhive.timeline import FINISHED

#: Columns that may differ between runs that are compared: often what the comparison is about.
ENVIRONMENT = ("code", "git_revision", "versions", "hardware", "link")
#: Configuration and scenario, and the replicates of both runs.
Group: TypeAlias = tuple[str, str, list[Replicate], list[Replicate]]


def unknown_settings(a: Settings, b: Settings, allow: Sequence[str]) -> Iterator[Problem]:
    """Yield the names in ``allow`` that are no setting of the runs."""
    keys = [key.split(".") for key in (*a, *b)]
    known = {".".join(parts[: n + 1]) for parts in keys for n in range(len(parts))}
    for name in allow:
        if name not in known and name != "plan":
            yield unknown("--allow", name, sorted({*known, "plan"}))


def different_settings(a: Settings, b: Settings, allow: Sequence[str]) -> Iterator[Problem]:
    """Yield the settings that differ and are not allowed to."""
    for key, (ours, theirs) in differing(a, b).items():
        if not any(key == name or key.startswith(f"{name}.") for name in allow):
            allowed = f"{ours!r} as in the first run; or --allow {key}"
            yield Problem(key, theirs, allowed)


def shared_groups(
    ours: Sequence[Replicate], theirs: Sequence[Replicate], problems: list[Problem]
) -> Iterator[Group]:
    """Yield configuration, scenario and replicates of both runs, for all that they share."""
    names = [list(dict.fromkeys(_identity(item) for item in run)) for run in (ours, theirs)]
    pairs = [(name, name) for name in names[0] if name in names[1]]
    if not pairs and len(names[0]) == len(names[1]) == 1:
        pairs = [(names[0][0], names[1][0])]
    if not pairs:
        first, second = (", ".join(name for name, _ in each[:6]) for each in names)
        text = f"a run that shares a configuration with the first, which has {first}"
        problems.append(Problem("configuration", second, text))
    found = False
    for one, two in pairs:
        label = one[0] if one[0] == two[0] else f"{one[0]} → {two[0]}"
        for scenario in dict.fromkeys(item.spec.scenario for item in ours):
            sides = (
                [i for i in run if _identity(i) == name and i.spec.scenario == scenario]
                for run, name in ((ours, one), (theirs, two))
            )
            left, right = sides
            if left and right:
                found = True
                yield label, scenario, left, right
    if pairs and not found:
        scenarios = [
            ", ".join(dict.fromkeys(item.spec.scenario for item in run)) for run in (ours, theirs)
        ]
        text = f"a run that shares a scenario with the first, which has {scenarios[0]}"
        problems.append(Problem("scenarios", scenarios[1], text))


def _identity(item: Replicate) -> tuple[str, tuple[Value, ...]]:
    """Return the label of a configuration, which rounds numbers, and the value of every axis."""
    values = tuple(item.row.get(axis.column.name) for axis in AXES)
    return str(item.row["configuration"]), values


def different_plans(groups: Iterable[Group], allow: Sequence[str]) -> Iterator[Problem]:
    """Yield scenarios whose fault plans differ between replicates of the same seed."""
    if "plan" in allow:
        return
    for _, scenario, ours, theirs in groups:
        plans = [
            {
                item.spec.seed: None if (plan := item.spec.plan) is None else plan.hash
                for item in run
            }
            for run in (ours, theirs)
        ]
        wrong = [seed for seed in plans[0] if seed in plans[1] and plans[0][seed] != plans[1][seed]]
        if wrong:
            allowed = f"the fault plan of the first run for seed {wrong[0]}; or --allow plan"
            yield Problem(f"scenario {scenario}", str(plans[1][wrong[0]])[:8], allowed)


def allowed_differences(settings: tuple[Settings, Settings], allow: Sequence[str]) -> Iterator[str]:
    """Yield the settings that differ, if some may."""
    if allow:
        for key, (ours, theirs) in differing(*settings).items():
            yield f"{key} differs, as allowed: {ours!r} and {theirs!r}."


def environment(ours: Sequence[Replicate], theirs: Sequence[Replicate]) -> Iterator[str]:
    """Yield differences of code, software and machines."""
    for name in ENVIRONMENT:
        sides = [sorted({str(item.row.get(name)) for item in run}) for run in (ours, theirs)]
        if sides[0] != sides[1]:
            yield f"{name} differs: {'; '.join(sides[0])} and {'; '.join(sides[1])}."


def left_out(groups: Iterable[Group]) -> Iterator[str]:
    """Yield how replicates were paired, and which were left out."""
    groups = list(groups)
    pairs = []
    for label, scenario, ours, theirs in groups:
        seeds = [{item.row["seed"] for item in run} for run in (ours, theirs)]
        common = len(seeds[0] & seeds[1])
        pairs.append(common)
        alone = len(seeds[0] ^ seeds[1])
        if not common:
            yield f"{label}, {scenario}: no seed in common; compared without pairs."
        elif alone:
            replicates = count_text(alone, "replicate")
            yield f"{label}, {scenario}: {replicates} without a partner left out."
        bad = {
            side: sum(item.row["state"] not in FINISHED for item in run)
            for side, run in (("first", ours), ("second", theirs))
        }
        for side, count in bad.items():
            if count:
                replicates = count_text(count, "replicate")
                yield f"{label}, {scenario}: {replicates} of the {side} run did not finish."
    if pairs and 0 < min(pairs) < LEAST_BY_RANK:
        yield (
            f"With fewer than {LEAST_BY_RANK} pairs an interval rests on the assumption of normal "
            "differences (of logarithms, for ratios)."
        )
