"""Replay of a recorded replicate: the same spec and fault plan, run by the present code."""

from __future__ import annotations

import os
from pathlib import Path

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.faults.kind import needs_of
from rayhive.metrics.rows import NO_FAULTS
from rayhive.registry import BASELINES
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import SPEC, read_spec
from rayhive.sweep.provenance import code_revision, fingerprint_of
from rayhive.sweep.replicate_runner import ReplicateRunner, Watcher
from rayhive.sweep.resolve import Demands, most_joining
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.signals import Interruption
from rayhive.sweep.target import target_at


def recorded_spec(
    folder: str | Path,
    trial: int | str,
    replicate: int = 0,
    scenario: str | None = None,
    out: str | Path | None = None,
) -> ReplicateSpec:
    """Return the spec of a replicate of a run, with its recorded fault plan.

    The plan is not made again, so changes to the library or to a trace do not matter.

    Args:
        folder: The run folder.
        trial: Number of the trial, or name of the baseline.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults, or the only
            one at all.
        out: Folder of the new replicate; by default that of the recorded one.

    Raises:
        ConfigError: The replicate does not exist, or its spec cannot be read.
    """
    path = replicate_folder(folder, trial, replicate, scenario)
    try:
        spec = read_spec(path)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(Problem("DIR", str(path / SPEC), f"a replicate: {first}")) from error
    target = Path(out).absolute() if out is not None else path
    return spec.model_copy(update={"attempt": 0, "folder": str(target)})


def replicate_folder(
    folder: str | Path, trial: int | str | None, replicate: int = 0, scenario: str | None = None
) -> Path:
    """Return the folder of a replicate of a run.

    Args:
        folder: The run folder, or without a trial also the folder of the replicate.
        trial: Number of the trial, or name of the baseline; None for the only trial.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults, or the only
            one at all.

    Raises:
        ConfigError: The replicate does not exist.
    """
    if trial is None and (Path(folder) / SPEC).is_file():
        return Path(folder)
    run = RunFolder(folder)
    trials = run.path / "trials"
    numbers = sorted(int(item.name) for item in trials.glob("*") if item.name.isdigit())
    if trial is None and len(numbers) == 1:
        trial = numbers[0]
    names = [*map(str, numbers), *sorted(x.name for x in trials.glob("*") if x.name in BASELINES)]
    if not names:
        raise ConfigError(Problem("DIR", str(run.path), "a run folder with replicates"))
    if trial is None or str(trial) not in names:
        listed = ", ".join(names) or "none"
        raise ConfigError(Problem("TRIAL", trial, f"a trial or baseline of {run.path}: {listed}"))
    prefix = f"r{replicate}-"
    specs = (trials / str(trial)).glob(f"{prefix}*/{SPEC}")
    found = sorted(path.parent.name.removeprefix(prefix) for path in specs)
    if not found:
        every = (path.parent.name for path in (trials / str(trial)).glob(f"r*-*/{SPEC}"))
        numbers = sorted({int(name[1:].split("-")[0]) for name in every})
        allowed = f"a replicate of trial {trial}: {', '.join(map(str, numbers)) or 'none'}"
        raise ConfigError(Problem("--replicate", replicate, allowed))
    name = scenario if scenario is not None else _choice(found)
    if name is None or name not in found:
        listed = ", ".join(found) or "none"
        allowed = f"a scenario of replicate {replicate} of trial {trial}: {listed}"
        close = None if scenario is None else nearest(scenario, found)
        raise ConfigError(Problem("--scenario", scenario, allowed, close))
    return run.replicate(trial, replicate, name)


def _choice(names: list[str]) -> str | None:
    faulted = [name for name in names if name != NO_FAULTS] or names
    return faulted[0] if len(faulted) == 1 else None


def run_again(
    spec: ReplicateSpec,
    recorded: str | Path,
    watcher: Watcher,
    interruption: Interruption,
    address: str | None,
) -> None:
    """Run one replicate with the code and data of now, which its spec and its row then name.

    Its peers work in the present working directory, as those of a sweep do: there lie the module
    and the data of which the fingerprint is recorded. The recorded directory may hold another
    version of them, or may be gone.

    Args:
        spec: The replicate; its folder must not hold one yet.
        recorded: The run folder that the spec is from.
        watcher: Display of the progress.
        interruption: Ends the replicate.
        address: Address of a Ray cluster; None for ``RAY_ADDRESS``, or else for this machine.

    Raises:
        ConfigError: The folder holds a replicate, the workload cannot be loaded, or the cluster
            does not meet the demands.
        Interrupted: The replicate was interrupted, and nothing of it runs any more.
    """
    if any(Path(spec.folder).glob("events*.jsonl")):
        raise ConfigError(Problem("--out", spec.folder, "a folder without a replicate"))
    spec = _of_now(spec, RunFolder(recorded))
    faults = () if spec.plan is None else spec.plan.faults
    needs = needs_of((fault.kind, fault.args) for fault in faults)
    demands = Demands(swarm=spec.swarm, needs=needs, joining=most_joining([spec.plan]))
    with target_at(address).cluster(demands, connected=interruption.install) as cluster:
        ReplicateRunner(cluster, watcher, interruption).run(spec)


def _of_now(spec: ReplicateSpec, recorded: RunFolder) -> ReplicateSpec:
    """Return a spec with the revision, the user's code and the directory of this process."""
    from rayhive.workloads.loading import workload_of

    workload = workload_of(spec.workload)
    code = fingerprint_of(spec.workload, workload.data_files(), workload.data)
    return spec.model_copy(
        update={
            "code": recorded.continued(code, accept=False).digest,
            "git_revision": code_revision(),
            "directory": os.getcwd(),
        }
    )
