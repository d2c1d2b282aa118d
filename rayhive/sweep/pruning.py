"""Pruning of a study: which replicates are skipped, and the bounds of those that run.

Every decision follows from the replicates that have finished, and is on disk: the bounds in the
spec of a replicate, a skipped one as a log without peers. So a resumed sweep decides the same, and
a table can be computed without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from rayhive.columns import Row, find_column, is_metric
from rayhive.errors import DamagedError, Problem
from rayhive.events import ReplicateFinished, ReplicateStarted, dump_event
from rayhive.files import write_atomically
from rayhive.metrics.folds import RestrictedMean
from rayhive.metrics.logs import last_timeline
from rayhive.metrics.pruning import Curve, curve_of, early_stop
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import SweepConfig
from rayhive.spec.pruning import BY_METRIC, SKIPPED, EarlyStop
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import EVENTS, archive, finished_event, read_spec
from rayhive.sweep.objectives import lacking
from rayhive.sweep.replicate_runner import prepare
from rayhive.timeline import FINISHED, UNKNOWN

#: Place, scenario and code of the replicates that share a row of the table.
_TableRow: TypeAlias = tuple[str, str, str | None]


class Pruning:
    """Prunes the replicates of one study.

    * A row (a configuration under a scenario) with a replicate that keeps it off the Pareto front
      (:func:`rayhive.sweep.objectives.lacking`) has its further replicates skipped.
    * With ``median`` and ``percentile``, a replicate begins with the bounds of
      :func:`rayhive.metrics.pruning.early_stop`.

    Replicates without faults are neither skipped nor stopped if there are scenarios with faults:
    those are compared with them. Baselines are not pruned, and bound no trial.

    Args:
        config: The study.
    """

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._hopeless: dict[_TableRow, str] = {}
        self._finished: dict[tuple[str, str | None], list[tuple[str, Path]]] = defaultdict(list)
        self._curves: dict[Path, Curve | None] = {}

    def _acts(self, spec: ReplicateSpec) -> bool:
        twin = spec.scenario == NO_FAULTS and len(self._config.scenarios) > 1
        return self._config.pruner.name != "none" and not twin and spec.baseline is None

    def prepared(self, spec: ReplicateSpec, may_skip: bool = True) -> ReplicateSpec:
        """Return the spec with its bounds; a hopeless replicate is recorded as skipped instead.

        A replicate that has begun keeps what was decided, also in a further attempt. One that was
        skipped is run if the reason does not hold any more.

        Args:
            spec: The replicate.
            may_skip: Whether a replicate may be skipped now.
        """
        if self._config.pruner.name == "none":
            return spec
        folder, acts = Path(spec.folder), self._acts(spec)
        why = self._hopeless.get((spec.place, spec.scenario, spec.code)) if acts else None
        if why is None and _is_skipped(folder):
            archive(folder)
        if not acts:
            return spec
        if (folder / EVENTS).exists():
            return spec.model_copy(update={"early_stop": _recorded_bounds(folder)})
        if why is not None and may_skip:
            _record_skipped(spec, why)
        elif self._config.pruner.name in BY_METRIC:
            bounds = early_stop(self._config.pruner, self._others(spec))
            return spec.model_copy(update={"early_stop": bounds})
        return spec

    def take(self, spec: ReplicateSpec, row: Row) -> None:
        """Take account of a replicate that has ended."""
        if not self._acts(spec) or row["state"] in UNKNOWN:
            return
        if row["state"] in FINISHED:
            of_scenario = self._finished[spec.scenario, _code(row)]
            of_scenario.append((spec.place, Path(spec.folder)))
        why = lacking(self._config, row)
        if why is not None:
            text = f"replicate {spec.replicate} {why}"
            self._hopeless.setdefault((spec.place, spec.scenario, _code(row)), text)

    def _others(self, spec: ReplicateSpec) -> Iterator[Curve]:
        """Yield the curves of finished replicates of other configurations."""
        for place, folder in self._finished[spec.scenario, spec.code]:
            if place != spec.place:
                if folder not in self._curves:
                    self._curves[folder] = curve_of(last_timeline(folder))
                curve = self._curves[folder]
                if curve is not None:
                    yield curve


def _code(row: Row) -> str | None:
    return None if row["code"] is None else str(row["code"])


def _is_skipped(folder: Path) -> bool:
    """Return whether the current attempt at a replicate was skipped."""
    with suppress(DamagedError):
        end = finished_event(folder)
        return end is not None and end.state == SKIPPED
    return False


def _recorded_bounds(folder: Path) -> EarlyStop | None:
    """Return the bounds with which a replicate began; None if it has none, or no readable spec."""
    with suppress(OSError, ValueError):
        return read_spec(folder).early_stop
    return None


def _record_skipped(spec: ReplicateSpec, why: str) -> None:
    """Write the log of a replicate that is not run."""
    spec = prepare(spec)
    reason = f"not run: {why}, so the row cannot be on the Pareto front"
    log = (
        ReplicateStarted(spec=spec.model_dump(mode="json", by_alias=True)),
        ReplicateFinished(state=SKIPPED, stop_reason=reason),
    )
    # in one step: a log without an end would be one of a replicate that runs
    write_atomically(Path(spec.folder) / EVENTS, "".join(f"{dump_event(event)}\n" for event in log))


def check_pruner(config: SweepConfig) -> Iterator[Problem]:
    """Yield the reasons why a study cannot have its pruner."""
    pruner = config.pruner
    if pruner.percentile is not None and pruner.name != "percentile":
        yield Problem("pruner.percentile", pruner.percentile, "absent without pruner: percentile")
    if pruner.name == "percentile" and pruner.percentile is None:
        yield Problem("pruner.percentile", None, "a share [%] above 0 and below 100")
    apart = [name for name in config.objectives if not _follows_loss(name)]
    if pruner.name in BY_METRIC and apart:
        yield Problem(
            "pruner",
            pruner.name,
            f"none or front with the objective {apart[0]}: a configuration that learns more slowly "
            "than the rest can be on the Pareto front because of it",
        )


def _follows_loss(objective: str) -> bool:
    """Return whether an objective only depends on how fast and how far the model learns."""
    column = find_column(objective)
    reaching = column is not None and isinstance(column.fold, RestrictedMean)
    return reaching or is_metric(objective) or objective == "final_loss"
