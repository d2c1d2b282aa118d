"""Recorded runs: comparisons of two, traces of replicates, and export to other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayhive.errors import ConfigError, Problem
from rayhive.files import check_writable
from rayhive.metrics.clocks import Clocks
from rayhive.metrics.logs import last_timeline
from rayhive.remote import local_folder
from rayhive.report import comparison
from rayhive.report.comparison import Comparisons
from rayhive.report.results import load_results
from rayhive.report.trace import write_trace
from rayhive.sweep.replay import replicate_folder

TRACE = "trace.json"


def compare(
    a: str | Path, b: str | Path, *, columns: Sequence[str] = (), allow: Sequence[str] = ()
) -> Comparisons:
    """Compare two runs, paired where seeds are common.

    Args:
        a: The first run folder or its URL, or the folder of one replicate.
        b: The second one.
        columns: Columns to compare; by default the objectives and some key figures.
        allow: Settings that may differ, as dotted keys of a study, and ``plan`` for fault plans.

    Raises:
        ConfigError: A folder is no run, or the runs cannot be compared; every reason is told.
    """
    return comparison.compare(local_folder(a), local_folder(b), columns, allow)


def trace(
    folder: str | Path,
    trial: int | str | None = None,
    *,
    replicate: int = 0,
    scenario: str | None = None,
    out: str | Path | None = None,
) -> tuple[Path, Clocks]:
    """Write the trace of a replicate, which https://ui.perfetto.dev opens.

    Args:
        folder: The run folder or its URL, or the folder of the replicate.
        trial: Number of the trial; by default the only one.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults.
        out: The file; by default ``trace.json`` in the folder of the replicate.

    Returns:
        The file, and the clocks of the nodes.

    Raises:
        ConfigError: The replicate does not exist, or has no events, or the file cannot be written.
        DamagedError: Its events cannot be read.
    """
    place = replicate_folder(local_folder(folder), trial, replicate, scenario)
    timeline = last_timeline(place)
    if not timeline.events:
        raise ConfigError(Problem("DIR", str(place), "a replicate with events"))
    path = place / TRACE if out is None else Path(out)
    check_writable(path, "--out")
    return path, write_trace(timeline, path)


def export(folder: str | Path, to: str, out: str | Path | None = None) -> tuple[Path, int]:
    """Write the replicates of a run for TensorBoard, Weights & Biases (offline) or MLflow.

    Replicates that measured nothing are left out, and, with a warning, damaged ones.

    Args:
        folder: The run folder or its URL, or the folder of one replicate.
        to: ``tensorboard``, ``wandb`` or ``mlflow``.
        out: A new folder for the files; by default one of this name in ``folder``.

    Returns:
        The folder, and the number of replicates.

    Raises:
        ConfigError: ``folder`` is neither, the tool is unknown or not installed, or ``out``
            exists.
    """
    from rayhive.report import loggers

    place = local_folder(folder)
    path = place / to if out is None else Path(out)
    return path, loggers.export(place, load_results(place), to, path)
