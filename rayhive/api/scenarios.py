"""Functions that run a single scenario, or a recorded replicate again."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rayhive.api.run import Run, load
from rayhive.api.story import story_progress
from rayhive.api.studies import Sets, assignments, execute
from rayhive.sweep.signals import Interrupted, Interruption

if TYPE_CHECKING:
    from rayhive.sweep.driver import Progress


def run_scenario(
    name: str,
    *,
    seed: int = 0,
    peers: int | None = None,
    config: str | Path | None = None,
    set: Sets = (),
    address: str | None = None,
    out: str | Path | None = None,
    twin: bool = True,
    progress: bool | Progress = True,
) -> Run:
    """Run one scenario on one configuration, and return its results.

    Args:
        name: Name of a scenario of the library, or the path of a scenario file.
        seed: Seed of the fault plan, the data and the parameters.
        peers: Peers that start together; by default the scenario's.
        config: A study whose swarm, workload and budget replace the scenario's.
        set: Values that replace single fields of the study.
        address: ``HOST:PORT`` of a running Ray cluster, or ``auto``; by default ``RAY_ADDRESS``, or
            else a Ray on this machine that ends with the call.
        out: The run folder; by default ``runs/NAME-TIME``.
        twin: Whether the same replicate runs without faults first, for the columns that compare.
        progress: Whether faults and recoveries are shown as they happen, or an object that shows
            progress.

    Returns:
        The results; :meth:`Run.stories` tells what broke and how it recovered.

    Raises:
        ConfigError: Bad input, with every mistake; nothing has been started or written.
        RayhiveError: The scenario could not be run.
        Interrupted: Ctrl-C or SIGTERM.
    """
    from rayhive.sweep.resolve import as_data, resolve
    from rayhive.sweep.scenario_study import scenario_config

    study = scenario_config(name, config, assignments(set), peers, seed)
    source = None if config is None else str(config)
    resolved = resolve(as_data(study), source=source, twin=twin)
    folder = Path(out) if out is not None else new_folder(resolved.config.name)
    return execute(resolved, folder, address, nullcontext(story_progress(progress)))


def replay(
    folder: str | Path,
    trial: int,
    *,
    replicate: int = 0,
    scenario: str | None = None,
    address: str | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = True,
) -> Run:
    """Run a recorded replicate again, with the recorded spec and fault plan.

    Args:
        folder: The run folder.
        trial: Number of the trial.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults.
        address: As for :func:`run_scenario`.
        out: Folder of the new replicate; by default ``runs/replay-TIME``.
        progress: As for :func:`run_scenario`.

    Returns:
        The results of the new replicate.

    Raises:
        ConfigError: The replicate does not exist, or ``out`` holds one.
        RayhiveError: The replicate could not be run.
        Interrupted: Ctrl-C or SIGTERM; its ``folder`` is that of the new replicate.
    """
    from rayhive.sweep.replay import recorded_spec, run_again
    from rayhive.sweep.target import target_at

    place = Path(out) if out is not None else new_folder("replay")
    spec = recorded_spec(folder, trial, replicate, scenario, out=place)
    try:
        with Interruption() as interruption:
            run_again(spec, story_progress(progress), interruption, target_at(address))
    except Interrupted as stop:
        stop.folder = place
        raise
    return load(place)


def new_folder(name: str) -> Path:
    """Return a new run folder ``runs/NAME-TIME``, for runs that are never resumed."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
