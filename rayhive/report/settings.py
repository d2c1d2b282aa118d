"""Replicates of a run with their specs, and the settings that make two runs comparable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rayhive.columns import Row
from rayhive.metrics.logs import timeline_of_row
from rayhive.report.results import load_results, replicate_place
from rayhive.spec.replicate import ReplicateSpec
from rayhive.spec.study import BASELINE_SETTINGS
from rayhive.spec.yaml_data import dotted
from rayhive.timeline import UNCOUNTED

#: Dotted key of a study -> value.
Settings: TypeAlias = Mapping[str, Any]
#: Parts of a spec that two runs have to share.
_SHARED = {"workload", "swarm", "budget", "evaluation"}
#: Settings without an influence on a replicate.
_IRRELEVANT = frozenset({"budget.trials"})


@dataclass(frozen=True)
class Replicate:
    """A counted replicate of a run.

    Attributes:
        row: Its columns.
        spec: Its specification.
    """

    row: Row
    spec: ReplicateSpec


@dataclass(frozen=True)
class RunReplicates:
    """Replicates of a run that are neither stopped nor unfinished.

    Attributes:
        replicates: The replicates.
        objectives: Column -> direction.
        damaged: Error of each replicate that could not be read.
    """

    replicates: tuple[Replicate, ...]
    objectives: Mapping[str, str]
    damaged: tuple[str, ...] = ()


def read_replicates(folder: str | Path) -> RunReplicates:
    """Read the replicates of a run folder, or the one of a replicate's folder.

    Raises:
        ConfigError: The folder is neither.
        DamagedError: The study or a spec cannot be read.
    """
    folder = Path(folder)
    results = load_results(folder)
    found = []
    for row in results.rows:
        if row["state"] not in UNCOUNTED:
            timeline = timeline_of_row(replicate_place(folder, row), row)
            found.append(Replicate(row, timeline.spec))
    return RunReplicates(tuple(found), results.objectives, results.damaged)


def shared_settings(
    ours: Sequence[Replicate], theirs: Sequence[Replicate]
) -> tuple[Settings, Settings]:
    """Return the settings that all replicates of a run share, of two runs.

    Those of a baseline are among them if both runs have it.
    """
    baselines = _baselines(ours) & _baselines(theirs)
    first, second = (_settings(replicates, baselines) for replicates in (ours, theirs))
    return first, second


def _baselines(replicates: Iterable[Replicate]) -> set[str | None]:
    return {each.spec.baseline for each in replicates}


def _settings(replicates: Sequence[Replicate], baselines: Collection[str | None]) -> Settings:
    data = replicates[0].spec.model_dump(mode="json", by_alias=True, include=_SHARED)
    for key, baseline in BASELINE_SETTINGS.items():
        if baseline in baselines:
            spec = next(each.spec for each in replicates if each.spec.baseline == baseline)
            data |= spec.model_dump(mode="json", by_alias=True, include={key})
    return {key: value for key, value in dotted(data) if key not in _IRRELEVANT}


def differing(a: Settings, b: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, with both values; None stands for one that is absent."""
    names: Iterable[str] = dict.fromkeys((*a, *b))
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}
