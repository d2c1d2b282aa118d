"""Functions that plan and run studies."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayhive.api.run import Run, load
from rayhive.errors import ConfigError, Problem, RayhiveError
from rayhive.remote import RemoteFolder, is_url
from rayhive.report.replicates import ReplicatesNeeded, needed, share, spread_in, unknown_spread
from rayhive.report.results import load_results
from rayhive.spec.yaml_data import Overrides
from rayhive.sweep.dry_run import Plan, make_plan
from rayhive.sweep.progress import default_progress
from rayhive.sweep.resolve import ResolvedStudy, StudyLike, resolve
from rayhive.sweep.run_folder import SWEEP, writable
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.target import target_at

if TYPE_CHECKING:
    from rayhive.sweep.driver import Progress


def sweep(
    study: StudyLike,
    *,
    set: Overrides = (),
    address: str | None = None,
    out: str | Path | None = None,
    code: str = "refuse",
    parallel: int | str = 1,
    progress: bool | Progress = True,
) -> Run:
    """Run a study, or resume it where it was interrupted, and return its results.

    Args:
        study: The path of a YAML file, a mapping with its content, or a
            :class:`rayhive.spec.SweepConfig`.
        set: Values that replace single fields of the study.
        address: ``HOST:PORT`` of a running Ray cluster, or ``auto``; by default ``RAY_ADDRESS``, or
            else a Ray on this machine that ends with the call.
        out: The run folder, or its URL, such as ``s3://BUCKET/PATH``; by default ``runs/NAME``, in
            a submitted job ``~/runs/NAME``.
        code: Treatment of a run folder that was begun with other code or data: ``refuse``,
            ``keep-apart`` or ``accept``.
        parallel: Replicates that run at the same time; ``auto`` for as many as the cluster has
            room for.
        progress: Whether progress is shown, or an object that shows it.

    Returns:
        The results. The Parquet files of the run folder are written.

    Raises:
        ConfigError: Bad input, with every mistake; nothing has been started or written.
        RayhiveError: The sweep cannot go on; finished replicates are kept.
        Interrupted: Ctrl-C or SIGTERM; the same call resumes the sweep.
    """
    from rayhive.sweep.sweep import default_folder

    resolved = resolve(study, set)
    folder = out if out is not None else default_folder(resolved.config.name)
    shown = _shown(resolved, progress)
    return execute(resolved, folder, address, shown, code, parallel=parallel)


def retry(
    folder: str | Path,
    *,
    set: Overrides = (),
    address: str | None = None,
    parallel: int | str = 1,
    progress: bool | Progress = True,
) -> Run:
    """Run again the replicates that were lost in every attempt, then resume the study.

    Args:
        folder: The run folder, or its URL.
        set: Values that replace single fields of the study, such as ``timeouts.starting``.
        address: As for :func:`sweep`.
        parallel: As for :func:`sweep`.
        progress: As for :func:`sweep`.

    Raises:
        ConfigError: ``folder`` is no run folder, or as for :func:`sweep`.
        RayhiveError: As for :func:`sweep`.
        Interrupted: As for :func:`sweep`.
    """
    place = RemoteFolder(str(folder), "DIR").begin() if is_url(folder) else Path(folder)
    if not (place / SWEEP).is_file():
        raise ConfigError(Problem("DIR", str(folder), f"a run folder, which has a {SWEEP}"))
    resolved = resolve(place / SWEEP, set)
    shown = _shown(resolved, progress)
    return execute(resolved, folder, address, shown, again=True, parallel=parallel)


def plan(study: StudyLike, *, set: Overrides = (), address: str | None = None) -> Plan:
    """Predict the trials, bytes and duration of a study; nothing is started or written.

    Args:
        study: As for :func:`sweep`.
        set: As for :func:`sweep`.
        address: The cluster that the study is for. It is not contacted, and this machine is not
            checked.

    Returns:
        The prediction; its ``unmet`` lists the reasons for which :func:`sweep` would refuse.

    Raises:
        ConfigError: The study has mistakes.
    """
    from rayhive.sweep.sweep import check_target

    target = target_at(address)
    resolved = target.planned(resolve(study, set))
    return replace(make_plan(resolved), unmet=tuple(check_target(resolved, target)))


def replicates_needed(
    plan: Plan,
    difference: str | float,
    *,
    spread: str | float | None = None,
    past: str | Path | None = None,
) -> list[ReplicatesNeeded]:
    """Return how many replicates show a difference of two rows in each objective of a study.

    Args:
        plan: Dry run of the study, of :func:`plan`.
        difference: Difference of two rows as a share of the smaller value, 0.1 or ``10%``.
        spread: Standard deviation between replicates of one row, as a share of the value. By
            default it is measured in a past run.
        past: Run folder to measure it in; by default the study's own.

    Raises:
        ConfigError: A share is not positive, or there is neither a spread nor a past run.
    """
    from rayhive.sweep.sweep import default_folder

    config = plan.study.config
    wanted = share("--difference", difference)
    given = None if spread is None else share("--spread", spread)
    folder = None if given is not None else Path(past or default_folder(plan.study.config.name))
    if folder is not None and past is None and not (folder / "trials").is_dir():
        raise unknown_spread(folder)
    results = None if folder is None else load_results(folder)
    measured = {
        name: (given, "given") if given is not None else spread_in(results, name)
        for name in config.objectives
    }
    return needed(measured, wanted, config.replicates, max(1, plan.trials - 1))


def execute(
    study: ResolvedStudy,
    place: str | Path,
    address: str | None,
    shown: AbstractContextManager[Progress],
    code: str = "refuse",
    again: bool = False,
    parallel: int | str = 1,
) -> Run:
    """Run a resolved study and write its tables, also if it is interrupted.

    Args:
        study: The study.
        place: Its run folder, or its URL.
        address: Address of a Ray cluster, if one is named.
        shown: Display of the progress.
        code: Treatment of a run folder that was begun with other code or data.
        again: Whether lost replicates get further attempts.
        parallel: Replicates that run at the same time, or ``auto``.

    Raises:
        ConfigError: As for :func:`rayhive.sweep.sweep.run_sweep`.
        RayhiveError: The sweep cannot go on.
        Interrupted: Its ``folder`` is the run folder.
    """
    from rayhive.sweep.sweep import run_sweep

    remote = RemoteFolder(str(place)) if is_url(place) else None
    folder = Path(place) if remote is None else remote.begin()
    try:
        with Interruption() as interruption, shown as progress:
            done = run_sweep(
                study,
                folder,
                progress,
                interruption,
                target_at(address),
                code=code,
                again=again,
                parallel=parallel,
                remote=remote,
            )
    except Interrupted as stop:
        stop.folder = folder
        if (folder / "trials").is_dir():
            with suppress(RayhiveError):  # of a URL; the next session copies what is missing
                _with_tables(folder, remote)
        raise
    return replace(_with_tables(folder, remote), done=done)


def _with_tables(folder: Path, remote: RemoteFolder | None) -> Run:
    """Load a run and write its Parquet files."""
    run = load(folder)
    with writable(folder):
        run.results.write_parquet(folder)
    if remote is not None and remote.is_claimed:
        remote.push()
    return run


def _shown(study: ResolvedStudy, progress: bool | Progress) -> AbstractContextManager[Progress]:
    if isinstance(progress, bool):
        return closing(default_progress(study.config, progress))
    return nullcontext(progress)
