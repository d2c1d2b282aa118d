"""Export of a run to TensorBoard, Weights & Biases or MLflow, through Lightning's loggers.

Each replicate is one run: its configuration are the hyperparameters, its evaluations the metrics by
committed samples, and the columns of its row the summary. Everything is read from the events on
disk, so a study can be exported at any time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhive.columns import Row, metric_columns, replicate_columns
from rayhive.errors import ConfigError, DamagedError, Problem, unknown
from rayhive.metrics.groups.convergence import EvaluationPoint, evaluations
from rayhive.metrics.logs import timeline_of_row
from rayhive.metrics.rows import place_of
from rayhive.report.results import Results, replicate_place
from rayhive.report.table_notes import damage_note
from rayhive.timeline import UNCOUNTED, UNKNOWN

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

#: Column groups that describe a replicate, and do not measure it.
_DESCRIPTION = ("replicate", "configuration", "provenance")


@dataclass(frozen=True)
class LoggedRun:
    """One replicate, as loggers show it.

    Attributes:
        study: Name of the study.
        name: Trial, replicate and scenario; with the fingerprint of the user's code if it differs.
        group: The configuration.
        parameters: Configuration, scenario and seed.
        points: Evaluations.
        final: Column -> value of its row.
    """

    study: str
    name: str
    group: str
    parameters: Mapping[str, Any]
    points: tuple[EvaluationPoint, ...]
    final: Mapping[str, float]


def runs(folder: Path, results: Results) -> Iterator[LoggedRun]:
    """Yield the replicates of a run that measured something.

    Left out are those that are lost, skipped, stopped or unfinished, and, with a warning, those
    that were damaged since the results were computed.

    Args:
        folder: The run folder, or the folder of one replicate.
        results: Its results.
    """
    columns = replicate_columns(metric_columns(results.rows))
    columns = tuple(column for column in columns if column.group not in _DESCRIPTION)
    several = len({row["code"] for row in results.rows}) > 1
    for row in results.rows:
        if row["state"] in UNCOUNTED | UNKNOWN:
            continue
        try:
            points = evaluations(timeline_of_row(replicate_place(folder, row), row))
        except DamagedError as error:
            warnings.warn(damage_note(str(error)), stacklevel=2)
            continue
        code = [str(row["code"])] if several else []
        numbers = {column.name: _number(row.get(column.name)) for column in columns}
        yield LoggedRun(
            study=results.name,
            name="-".join([*place_of(row).parts[1:], *code]),
            group=str(row["configuration"]),
            parameters=_parameters(row),
            points=points,
            final={key: value for key, value in numbers.items() if value is not None},
        )


def _parameters(row: Row) -> dict[str, Any]:
    columns = [column.name for column in replicate_columns() if column.group == "configuration"]
    names = dict.fromkeys([*columns, "scenario", "trial", "replicate", "seed", "state"])
    return {name: row[name] for name in names if row.get(name) is not None}


def _number(value: object) -> float | None:
    """Return a finite number as such; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _tensorboard(run: LoggedRun, out: Path) -> Logger:
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(out, run.study, run.name)
    logger.log_hyperparams(dict(run.parameters), dict(run.final))
    return logger


def _wandb(run: LoggedRun, out: Path) -> Logger:
    from lightning.pytorch.loggers import WandbLogger

    out.mkdir(parents=True, exist_ok=True)
    logger = WandbLogger(
        run.name, out, offline=True, project=run.study, group=run.group, reinit="finish_previous"
    )
    logger.log_hyperparams(dict(run.parameters))
    logger.experiment.summary.update(dict(run.final))
    return logger


def _mlflow(run: LoggedRun, out: Path) -> Logger:
    from lightning.pytorch.loggers import MLFlowLogger

    out.mkdir(parents=True, exist_ok=True)
    uri = f"sqlite:///{out.absolute()}/mlflow.db"
    logger = MLFlowLogger(run.study, run.name, uri, artifact_location=str(out / "artifacts"))
    logger.log_hyperparams(dict(run.parameters))
    logger.log_metrics(dict(run.final))
    return logger


#: Name of a tool -> its packages, any of which will do, and the function that begins a run.
TOOLS: dict[str, tuple[tuple[str, ...], Callable[[LoggedRun, Path], Logger]]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), _tensorboard),
    "wandb": (("wandb",), _wandb),
    "mlflow": (("mlflow",), _mlflow),
}


def export(folder: Path, results: Results, tool: str, out: Path) -> int:
    """Write the replicates of a run for a tool; return their number. Warn of damaged ones.

    Args:
        folder: The run folder, or the folder of one replicate.
        results: Its results.
        tool: ``tensorboard``, ``wandb`` (offline) or ``mlflow``.
        out: A new folder for its files.

    Raises:
        ConfigError: The tool is unknown, not installed or too old, or the folder exists.
    """
    if tool not in TOOLS:
        raise ConfigError(unknown("--to", tool, TOOLS))
    packages, begin = TOOLS[tool]
    if not any(find_spec(package) for package in packages):
        raise ConfigError(Problem("--to", tool, f"an installed tool: pip install {packages[0]}"))
    if out.exists():
        raise ConfigError(Problem("--out", str(out), "a folder that does not exist yet"))
    for text in results.damaged:
        warnings.warn(damage_note(text), stacklevel=2)
    count = 0
    for run in runs(folder, results):
        try:
            logger = begin(run, out)
        except ModuleNotFoundError as error:  # Lightning's logger needs another version
            with suppress(OSError):
                out.rmdir()
            allowed = (
                f"a tool that Lightning's logger can use: pip install -U {packages[0]} ({error})"
            )
            raise ConfigError(Problem("--to", tool, allowed)) from error
        for point in run.points:
            values = {**point.values, "round": point.round, "clock_s": point.clock_s}
            logger.log_metrics(values, step=point.samples)
        logger.finalize("success")
        if tool == "wandb":
            logger.experiment.finish()  # type: ignore[attr-defined]
        count += 1
    if tool == "wandb":
        import wandb

        wandb.teardown()  # its service is a process of its own
    return count
