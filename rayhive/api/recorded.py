"""Recorded replicates: their traces."""

from __future__ import annotations

from pathlib import Path

from rayhive.errors import ConfigError, Problem
from rayhive.metrics.clocks import Clocks
from rayhive.metrics.logs import last_timeline
from rayhive.report.trace import write_trace
from rayhive.sweep.replay import replicate_folder

TRACE = "trace.json"


def trace(
    folder: str | Path,
    trial: int | None = None,
    *,
    replicate: int = 0,
    scenario: str | None = None,
    out: str | Path | None = None,
) -> tuple[Path, Clocks]:
    """Write the trace of a replicate, which https://ui.perfetto.dev opens.

    Args:
        folder: The run folder, or the folder of the replicate.
        trial: Number of the trial; by default the only one.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults.
        out: The file; by default ``trace.json`` in the folder of the replicate.

    Returns:
        The file, and the clocks of the nodes.

    Raises:
        ConfigError: The replicate does not exist, or has no events.
        DamagedError: Its events cannot be read.
    """
    place = replicate_folder(folder, trial, replicate, scenario)
    timeline = last_timeline(place)
    if not timeline.events:
        raise ConfigError(Problem("DIR", str(place), "a replicate with events"))
    path = place / TRACE if out is None else Path(out)
    return path, write_trace(timeline, path)
