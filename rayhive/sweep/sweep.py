"""Execution of a study: pre-flight check, cluster, run folder, storage, driver.

Every check that needs neither Ray nor the run folder comes first: if one fails, nothing has been
started or written.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rayhive.cluster.address import in_job
from rayhive.columns import Row
from rayhive.errors import ConfigError, Problem, nearest, unknown
from rayhive.metrics.rows import Codes, replicate_row
from rayhive.remote import RemoteFolder
from rayhive.spec.study import scenario_label
from rayhive.sweep.driver import Done, Driver, Progress
from rayhive.sweep.provenance import CHOICES, Fingerprint, fingerprint_of
from rayhive.sweep.replicate_runner import Swarms
from rayhive.sweep.resolve import ResolvedStudy
from rayhive.sweep.run_folder import RunFolder, writable
from rayhive.sweep.samplers import make_sampler
from rayhive.sweep.signals import Interruption
from rayhive.sweep.storage import check_storage, open_study, usable
from rayhive.sweep.target import Target, target_at
from rayhive.sweep.trial_book import SCENARIOS, TrialBook


def default_folder(name: str) -> Path:
    """Return the default run folder of a study or another run of this name.

    In a submitted job it lies in the home directory: Ray gives each job a new working directory and
    removes it some time after the job, and the next job has to find the run to resume it.
    """
    return (Path.home() if in_job() else Path()) / "runs" / name


def check_target(study: ResolvedStudy, target: Target) -> Iterator[Problem]:
    """Yield the demands of a study that its storage or its target does not meet."""
    if study.config.storage is not None:
        yield from check_storage(study.config.storage)
    yield from target.problems(study.demands)


#: Option with the number of replicates that run at the same time.
PARALLEL = "--parallel"
#: As many replicates at the same time as the cluster has room for.
AUTO = "auto"


def check_parallel(parallel: int | str) -> Iterator[Problem]:
    """Yield a problem unless ``parallel`` is a number of at least 1, or ``auto``."""
    number = int(parallel) if str(parallel).isdecimal() else 0
    if parallel != AUTO and number < 1:
        close = nearest(str(parallel), [AUTO])
        yield Problem(PARALLEL, parallel, f"a whole number of at least 1, or {AUTO}", close)


def places(study: ResolvedStudy, cluster: Swarms, parallel: int | str) -> int:
    """Return how many replicates of a study run at the same time.

    Args:
        study: The study.
        cluster: Where it runs.
        parallel: The wanted number, or ``auto``.

    Raises:
        ConfigError: The cluster has no room for so many.
    """
    if str(parallel) == "1":
        return 1
    swarm = study.demands.swarm
    most = cluster.at_once(swarm, study.demands.joining)
    if parallel != AUTO and int(parallel) > most:
        why = (
            "as many as get all of their cores"
            if swarm.share_nodes
            else "as many as get nodes of their own (swarm.share_nodes=true lets them share nodes, "
            "and their times and rates then depend on that load)"
        )
        raise ConfigError(Problem(PARALLEL, parallel, f"at most {most} on this cluster, {why}"))
    return most if parallel == AUTO else int(parallel)


def preflight(
    study: ResolvedStudy,
    run: RunFolder,
    target: Target,
    code: str = "refuse",
    parallel: int | str = 1,
) -> None:
    """Check a run before Ray is started; nothing is written.

    Args:
        study: The study.
        run: Its run folder.
        target: Where it runs.
        code: Treatment of a run folder that was begun with other code or data: ``refuse``,
            ``keep-apart`` or ``accept``.
        parallel: Replicates that run at the same time, or ``auto``.

    Raises:
        ConfigError: The run cannot be started or resumed in its folder, its storage cannot be used,
            or the target does not meet its demands.
    """
    if code not in CHOICES:
        raise ConfigError(unknown("--code", code, CHOICES))
    problems = list(run.check(study.config))
    if not study.demands.optional:  # what they are replaced by is known once the target is joined
        problems += run.check_plans(study.scenarios)
    if not problems and code == "refuse":
        problems += run.check_code(study.config, fingerprint(study))
    problems += check_parallel(parallel)
    problems += check_target(study, target)
    if problems:
        raise ConfigError(problems)


def run_sweep(
    study: ResolvedStudy,
    folder: Path,
    progress: Progress,
    interruption: Interruption,
    target: Target | None = None,
    code: str = "refuse",
    again: bool = False,
    parallel: int | str = 1,
    remote: RemoteFolder | None = None,
) -> Done:
    """Run or resume a study.

    Args:
        study: The study.
        folder: Its run folder.
        progress: Display of the progress.
        interruption: Ends the sweep; its handlers are installed.
        target: Where the study runs; by default the cluster that ``RAY_ADDRESS`` names, or else a
            Ray on this machine.
        code: Treatment of a run folder that was begun with other code or data: ``refuse``;
            ``keep-apart``, which gives the new replicates rows of their own; or ``accept``, by
            which the user states that the change is none in behaviour.
        again: Whether replicates that were lost in every attempt get the same number of further
            attempts.
        parallel: Replicates that run at the same time, or ``auto`` for as many as the cluster has
            room for.
        remote: The run folder at a URL that ``folder`` is the copy of; None for a local one.

    Raises:
        ConfigError: Bad input; nothing has been written.
        ClusterError: Several replicates in a row were lost to the infrastructure.
        RayhiveError: The disk of the run folder is full.
        Interrupted: The sweep was interrupted, and nothing of it runs any more.
    """
    target = target or target_at()
    study = target.planned(study)
    run = RunFolder(folder)
    preflight(study, run, target, code, parallel)
    if remote is not None:
        remote.claim()
        progress.note(f"this run is kept in {remote.url}; its local copy is {run.path}")
    elif in_job():
        progress.note(f"this run is kept in {run.path} on {socket.gethostname()}")
    with target.placed(study, connected=interruption.install) as (cluster, study):
        at_once = places(study, cluster, parallel)
        if parallel == AUTO or at_once > 1:
            progress.note(_at_once_text(study, at_once))
        if problems := list(run.check_plans(study.scenarios)):
            raise ConfigError(problems)
        now = run.continued(fingerprint(study), accept=code == "accept")
        with (
            usable(study.config.storage),
            writable(run.path),
            run.opened(study.config, now) as identity,
        ):
            book = open_book(study, run, identity)
            if remote is not None:
                remote.push()
            return Driver(
                study,
                run,
                book,
                cluster,
                progress,
                interruption,
                code=now,
                again=again,
                at_once=at_once,
                measure=replicate_row if remote is None else _measure_and_push(remote),
            ).run()


def _measure_and_push(remote: RemoteFolder) -> Callable[[Path, Codes], Row]:
    """Return the function that measures a finished replicate, and copies it before it counts."""

    def measure(folder: Path, codes: Codes) -> Row:
        row = replicate_row(folder, codes)
        remote.push(folder)
        return row

    return measure


def _at_once_text(study: ResolvedStudy, at_once: int) -> str:
    number = f"{at_once} replicates at a time" if at_once > 1 else "one replicate at a time"
    if at_once > 1 and study.demands.swarm.share_nodes:
        return (
            f"{number}, which may share nodes (swarm.share_nodes): throughput and times measured "
            "beside others are not comparable with those measured alone"
        )
    return f"{number}, each with its nodes to itself" if at_once > 1 else number


def fingerprint(study: ResolvedStudy) -> Fingerprint:
    """Return the fingerprint of the code and data of a study's workload."""
    workload = study.workload
    return fingerprint_of(study.config.workload, workload.data_files, workload.data)


def open_book(study: ResolvedStudy, run: RunFolder, identity: str) -> TrialBook:
    """Open the trials of a study.

    Args:
        study: The study.
        run: Its run folder.
        identity: Identity of the run, as its folder keeps it.

    Raises:
        ConfigError: The storage cannot be used, or lacks the trials that the folder holds.
    """
    config = study.config
    trials = open_study(config, run.path, identity)
    if SCENARIOS not in trials.user_attrs:
        began = run.before if run.before is not None and trials.get_trials() else config
        trials.set_user_attr(SCENARIOS, [scenario_label(name) for name in began.scenarios])
    if run.has_trials and not trials.get_trials(deepcopy=False):
        url = config.storage or str(run.path / "study.db")
        allowed = f"the storage with the trials of {run.path}; this one has none"
        raise ConfigError(Problem("storage", url, allowed))
    return TrialBook(
        trials,
        study.space,
        config.enqueue,
        config.seed,
        in_order=config.sampler == "grid",
        sampler=partial(make_sampler, config.sampler, config.seed),
        scenarios=frozenset(trials.user_attrs[SCENARIOS]),
    )
