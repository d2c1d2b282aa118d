"""A recorded replicate, to be run again."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from rayhive.errors import ConfigError, Problem, nearest
from rayhive.faults.queries import needs_of
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.replicate_runner import ReplicateRunner, Watcher
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.scenarios import host_of
from rayhive.sweep.signals import Interruption

SPEC = "spec.json"


def recorded_spec(
    folder: str | Path,
    trial: int,
    replicate: int = 0,
    scenario: str | None = None,
    out: str | Path | None = None,
) -> ReplicateSpec:
    """Return what a replicate of a run was, its fault plan as it was recorded included.

    The plan is not made anew: what the library or a trace says today does not matter.

    Args:
        folder: The run folder.
        trial: Number of the trial.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults, or the only
            one that there is.
        out: Folder of the new replicate; by default that of the recorded one.

    Raises:
        ConfigError: There is no such replicate, or its specification can't be read.
    """
    run = RunFolder(folder)
    trials = run.path / "trials"
    numbers = sorted(int(item.name) for item in trials.glob("*") if item.name.isdigit())
    if trial not in numbers:
        listed = ", ".join(map(str, numbers)) or "none"
        raise ConfigError(Problem("TRIAL", trial, f"a trial of {run.path}: {listed}"))
    prefix = f"r{replicate}-"
    found = sorted(
        path.parent.name.removeprefix(prefix)
        for path in (trials / str(trial)).glob(f"{prefix}*/{SPEC}")
    )
    name = scenario if scenario is not None else _choice(found)
    if name is None or name not in found:
        listed = ", ".join(found) or "none"
        raise ConfigError(
            Problem(
                "--scenario",
                scenario,
                f"one of those that replicate {replicate} of trial {trial} ran under: {listed}",
                None if scenario is None else nearest(scenario, found),
            )
        )
    path = run.replicate(trial, replicate, name)
    try:
        spec = ReplicateSpec.model_validate_json((path / SPEC).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(Problem("DIR", str(path / SPEC), f"a replicate: {first}")) from error
    target = Path(out).absolute() if out is not None else path
    return spec.model_copy(update={"attempt": 0, "folder": str(target)})


def _choice(names: list[str]) -> str | None:
    faulted = [name for name in names if name != NO_FAULTS] or names
    return faulted[0] if len(faulted) == 1 else None


def run_again(
    spec: ReplicateSpec, watcher: Watcher, interruption: Interruption, address: str | None = None
) -> None:
    """Run one replicate, on a testbed if its faults or its nodes need one.

    Args:
        spec: The replicate; its folder has to be new.
        watcher: Whoever wants to see.
        interruption: Ends it.
        address: Address of a Ray cluster; None starts one on this machine.

    Raises:
        ConfigError: Something runs in its folder already, or the swarm does not fit.
        Interrupted: It was told to end; nothing of it runs any more.
    """
    from rayhive.cluster.cluster import Cluster

    if any(Path(spec.folder).glob("events*.jsonl")):
        raise ConfigError(Problem("--out", spec.folder, "a folder without a replicate"))
    faults = () if spec.plan is None else spec.plan.faults
    needs = needs_of((fault.kind, fault.args) for fault in faults)
    host = host_of(needs, spec.swarm, address, lambda: spec.slots - spec.swarm.peers)
    with host as found, Cluster.connect(found) as cluster:
        interruption.install()
        problems = [*cluster.check_room(spec.swarm), *cluster.check_kinds(needs, spec.swarm)]
        if problems:
            raise ConfigError(problems)
        ReplicateRunner(cluster, watcher, interruption).run(spec)
