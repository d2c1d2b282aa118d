"""A sweep from its study to its last trial: checks, cluster, folder, storage, driver.

Nothing is written and Ray is not started before every check that can be made without them has
passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from rayhive.cluster.address import in_job, named
from rayhive.cluster.node import capabilities
from rayhive.cluster.replicate.placement import gpu_problems, this_machine
from rayhive.errors import ConfigError, Problem
from rayhive.spec import SwarmConfig
from rayhive.sweep.code_fingerprint import CodeFingerprints, Fingerprint, fingerprint_of
from rayhive.sweep.driver import Done, Driver, Progress
from rayhive.sweep.files import writable
from rayhive.sweep.replicate_runner import Swarms
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.scenarios import host_of, later, needs_of_study
from rayhive.sweep.signals import Interruption
from rayhive.sweep.space import SearchSpace
from rayhive.sweep.storage import check_storage, open_study
from rayhive.sweep.study import Study
from rayhive.sweep.trial_book import TrialBook


class ClusterLike(Swarms, Protocol):
    """What a sweep needs of a cluster."""

    def check_room(self, swarm: SwarmConfig) -> Iterable[Problem]:
        """Find what keeps the swarm from fitting."""

    def check_kinds(
        self, needs: Mapping[str, Collection[str]], swarm: SwarmConfig
    ) -> Iterable[Problem]:
        """Find kinds of faults whose needs such a swarm does not find there."""


#: Connects to the cluster at an address, or starts a local one where there is none.
Connect = Callable[[str | None], AbstractContextManager[ClusterLike]]


def default_folder(study: Study) -> Path:
    """Return where a run goes unless somebody says otherwise.

    A submitted job's working directory is Ray's: another one for each job, and removed some time
    after it. Its runs go to the home instead, where the next job finds them and goes on.
    """
    return (Path.home() if in_job() else Path()) / "runs" / study.config.name


def preflight(
    study: Study, folder: Path, address: str | None = None, code: str = "refuse"
) -> RunFolder:
    """Check what can be checked before Ray is started; nothing is written.

    Args:
        study: The study.
        folder: Its run folder.
        address: The cluster that is named for it, if one is.
        code: What is done if the run folder was begun with other code or data: ``refuse``,
            ``keep-apart`` or ``accept``.

    Raises:
        ConfigError: The run cannot be started or continued in ``folder``, or its trials cannot be
            kept where the study says.
    """
    run = RunFolder(folder)
    problems = list(run.check(study.config))
    if not problems and code == "refuse":
        problems += run.check_code(study.config, fingerprint(study))
    problems += check_machine(study, address)
    if problems:
        raise ConfigError(problems)
    return run


def check_machine(study: Study, address: str | None = None) -> Iterator[Problem]:
    """Find what the study asks for and this machine, or the storage, does not have.

    Args:
        study: The study.
        address: The cluster that is named for the study, if one is: then its nodes are what
            counts, and they are asked once it is joined.
    """
    if study.config.storage is not None:
        yield from check_storage(study.config.storage)
    if named(address):
        return
    needs = needs_of_study(study.config)
    if needs:
        yield from capabilities.missing(needs, capabilities.here())
    yield from gpu_problems(study.config.swarm, [this_machine()])


def run_sweep(
    study: Study,
    folder: Path,
    progress: Progress,
    interruption: Interruption,
    address: str | None = None,
    connect: Connect | None = None,
    code: str = "refuse",
    again: bool = False,
) -> Done:
    """Run or resume a study.

    Args:
        study: The study.
        folder: Its run folder.
        progress: Whoever wants to see.
        interruption: Ends it; its handlers are installed.
        address: Address of a Ray cluster; None starts one on this machine, unless the
            environment names one.
        connect: Makes the cluster; by default Ray's.
        code: What is done if the run folder was begun with other code or data: ``refuse``;
            ``keep-apart``, so that what is run from now on has rows of its own; or ``accept``, as
            the user says that it does the same.
        again: Whether replicates that were lost in every attempt get as many once more.

    Raises:
        ConfigError: Bad input, found before anything is written.
        ClusterError: The infrastructure loses one replicate after the other.
        RayhiveError: The disk of the run folder is full.
        Interrupted: It was told to end; nothing of it runs any more.
    """
    run = preflight(study, folder, address, code)
    config, swarm = study.config, study.config.swarm
    needs = needs_of_study(config)
    host = host_of(needs, swarm, address, lambda: later(config))
    with host as found, (connect or _ray)(found) as cluster:
        interruption.install()  # Ray has put its own handler in the place of ours
        problems = [*cluster.check_room(swarm), *cluster.check_kinds(needs, swarm)]
        if problems:
            raise ConfigError(problems)
        now = run.continued(fingerprint(study), accept=code == "accept")
        watched = CodeFingerprints(now, config.workload)
        with writable(run.path), run.opened(config, now) as identity:
            book = open_book(study, run, identity)
            driver = Driver(
                study, run, book, cluster, progress, interruption, code=watched, again=again
            )
            return driver.run()


def fingerprint(study: Study) -> Fingerprint:
    """Return which code and data the workload of a study is made of."""
    return fingerprint_of(study.config.workload, study.data_files, study.data)


def open_book(study: Study, run: RunFolder, identity: str) -> TrialBook:
    """Open the trials of a study.

    Raises:
        ConfigError: The storage cannot be used, or lacks the trials that the folder holds.
    """
    config = study.config
    trials = open_study(config, run.path, identity)
    if run.has_trials and not trials.get_trials(deepcopy=False):
        raise ConfigError(
            Problem(
                "storage",
                config.storage or str(run.path / "study.db"),
                f"the storage that knows the trials in {run.path}; this one knows none",
            )
        )
    space = SearchSpace(config.space, study.shapes)
    return TrialBook(trials, space, config.enqueue, config.seed)


def _ray(address: str | None) -> AbstractContextManager[ClusterLike]:
    from rayhive.cluster.cluster import Cluster

    return Cluster.connect(address)
