"""Study: the whole of one YAML file."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from rayhive.columns import Direction
from rayhive.errors import without_secrets
from rayhive.spec.axes import AXES
from rayhive.spec.configuration import Configuration, Space
from rayhive.spec.model import LONGEST_S, MOST, Model
from rayhive.spec.pruning import Pruner
from rayhive.spec.swarm import SwarmConfig

#: A scenario's name is part of the names of folders and actors.
SCENARIO_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")


class TargetConfig(Model):
    """Value of a metric at which a run of a plain Lightning module has converged.

    Attributes:
        metric: Name under which ``validation_step`` logs or returns it.
        value: The value to reach.
        mode: Whether smaller (``min``) or larger (``max``) values are better.
    """

    metric: str = Field(min_length=1)
    value: float
    mode: Literal["min", "max"]


class WorkloadConfig(Model):
    """Workload: a registered one by name, or the user's own by import path.

    Attributes:
        name: Name of a registered workload.
        import_path: Import path of a ``Workload`` or of a plain ``LightningModule``.
        args: Arguments of the workload or of the module.
        data: Import path of the ``LightningDataModule`` of a plain module.
        data_args: Arguments of the data module.
        target: Target of a plain module; a ``Workload`` has its own.
    """

    name: str | None = None
    import_path: str | None = Field(default=None, alias="import")
    args: dict[str, Any] = Field(default_factory=dict)
    data: str | None = None
    data_args: dict[str, Any] = Field(default_factory=dict)
    target: TargetConfig | None = None

    @property
    def label(self) -> str:
        """Name in the rows of the results."""
        return self.name or self.import_path or "unnamed"


class Budget(Model):
    """Limits of a study and of its replicates.

    Attributes:
        trials: Configurations to try.
        seconds_per_replicate: Longest training time of one replicate [s].
        samples_per_replicate: Committed samples after which a replicate is complete; None if only
            the seconds limit it.
        stop_at_target: End a replicate when its target is reached.
    """

    trials: int = Field(default=24, ge=1, le=1_000_000)
    seconds_per_replicate: float = Field(default=120.0, ge=0.1, le=LONGEST_S)
    samples_per_replicate: int | None = Field(default=None, ge=1, le=MOST)
    stop_at_target: bool = False

    def rounds(self, target_batch_size: int) -> int | None:
        """Return the number of rounds in the budget of samples; None if only seconds limit it."""
        samples = self.samples_per_replicate
        return None if samples is None else -(-samples // target_batch_size)


class Evaluation(Model):
    """Schedule of evaluations on the held-out split.

    Attributes:
        every_samples: Committed samples between two evaluations.
    """

    every_samples: int = Field(default=2048, ge=1, le=MOST)

    def rounds(self, round_size: int) -> int:
        """Return the number of rounds between two evaluations, from the samples of a round."""
        return max(1, round(self.every_samples / round_size))


#: Limit of a phase [s]: at most a week, which every clock and timer can represent.
Limit = Annotated[float, Field(gt=0, le=604_800)]


class Timeouts(Model):
    """Limits of the phases before and after the training of a replicate, all in seconds.

    Attributes:
        placing: Wait for free resources on the cluster.
        supervisor: From the start of the replicate's supervisor to its first answer.
        starting: From the first peer's start to its DHT: imports, and a process for every peer.
        barrier: From the first peer's DHT until every peer is ready: data, model, DHT.
        stopping: From the command to stop to the end of training; the swarm's
            ``averaging_timeout`` is added.
        teardown: From the command to shut down to the exit of the last peer.
        unreachable: Time for which an actor may be unavailable before it counts as lost.
    """

    placing: Limit = 600.0
    supervisor: Limit = 60.0
    starting: Limit = 120.0
    barrier: Limit = 120.0
    stopping: Limit = 15.0
    teardown: Limit = 15.0
    unreachable: Limit = 60.0


class ElasticConfig(Model):
    """Settings of the baseline ``elastic``; the last three are torch's, with torch's defaults.

    Attributes:
        checkpoint_every_rounds: Rounds between two checkpoints. A failure loses half as many on
            average.
        last_call_timeout: Wait of a group for further members, when it is not complete [s].
        keep_alive_interval: Interval of the members' signs of life [s].
        keep_alive_max_attempt: Number of missing signs after which a member counts as gone.
    """

    checkpoint_every_rounds: int = Field(default=10, ge=1, le=MOST)
    last_call_timeout: int = Field(default=30, ge=1, le=LONGEST_S)
    keep_alive_interval: int = Field(default=5, ge=1, le=LONGEST_S)
    keep_alive_max_attempt: int = Field(default=3, ge=1, le=1000)


class LocalSGDConfig(Model):
    """Settings of the baseline ``local-sgd``.

    Attributes:
        local_steps: Batches of the swarm in a round, as with the axis ``local_steps``.
    """

    local_steps: int = Field(default=4, ge=1, le=MOST)


#: Key of a baseline's settings -> name of the baseline.
BASELINE_SETTINGS = {"elastic": "elastic", "local_sgd": "local-sgd"}


class PreemptionConfig(Model):
    """Reaction to the notice of Ray or of a cloud that a node will be taken away.

    Attributes:
        sources: Names of the notice sources that every node asks, none if empty; ``auto`` for Ray
            and the cloud that a node runs on.
        then: ``repeat`` gives the replicate up and repeats it, without the node. ``continue`` lets
            the node's peers leave as after an injected notice, and counts what the others do.
        on_risk: Reaction to a raised risk, such as a rebalance recommendation of AWS: ``record``
            it, or ``leave`` as after a notice without a deadline.
    """

    sources: Literal["auto"] | tuple[str, ...] = "auto"
    then: Literal["repeat", "continue"] = "repeat"
    on_risk: Literal["record", "leave"] = "record"


#: Names of the samplers.
SamplerName = Literal["tpe", "gp", "nsga2", "random", "grid"]


class SweepConfig(Model):
    """One study.

    Attributes:
        name: Name of the study.
        workload: Module, data and target.
        swarm: Peers and the settings of their rounds.
        space: Distributions of the searched axes.
        enqueue: Configurations to try first.
        scenarios: Fault scenarios of every configuration: registered names, and paths of the
            user's own scenario files.
        twins: Whether ``none`` is added to scenarios that lack it, so that each faulted replicate
            has its twin.
        scenario_args: Name of a scenario -> values of its parameters.
        across_scenarios: Reduction of an objective over the scenarios of a trial.
        replicates: Repetitions under each scenario.
        baselines: Names of other ways to train the workload, which are measured for comparison
            under the same scenarios, seeds and links.
        elastic: Settings of the baseline ``elastic``.
        local_sgd: Settings of the baseline ``local-sgd``.
        objectives: Column -> direction.
        budget: Limits of the study and of its replicates.
        evaluation: Schedule of evaluations.
        interleave: Number of suggested configurations whose replicates are run in turn.
        sampler: Which configuration is tried next: TPE, Gaussian processes, NSGA-II, at random, or
            all of them in order.
        pruner: Which replicates are skipped or stopped as hopeless.
        timeouts: Limits of the phases before and after training.
        preemption: Reaction to real preemption notices.
        retries: Further attempts at a replicate that the infrastructure lost.
        warm_up_s: Training time of a replicate that runs before the first one and counts nowhere
            [s]; 0 for none.
        seed: Seed of the sampler and of all replicates.
        storage: URL of the database of trials; None is a file in the run folder. ``${NAME}`` stands
            for an environment variable.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    workload: WorkloadConfig
    swarm: SwarmConfig = SwarmConfig()
    space: Space = Space()
    enqueue: tuple[Configuration, ...] = ()
    scenarios: tuple[str, ...] = Field(default=("none",), min_length=1)
    twins: bool = True
    scenario_args: dict[str, dict[str, Any]] = Field(default_factory=dict)
    across_scenarios: Literal["mean", "worst"] = "mean"
    replicates: int = Field(default=3, ge=1, le=1000)
    baselines: tuple[str, ...] = ()
    elastic: ElasticConfig = ElasticConfig()
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    objectives: dict[str, Direction] = Field(
        default={"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"},
        min_length=1,
    )
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    interleave: int = Field(default=4, ge=1, le=1000)
    sampler: SamplerName = "tpe"
    pruner: Pruner = Pruner()
    timeouts: Timeouts = Timeouts()
    preemption: PreemptionConfig = PreemptionConfig()
    retries: int = Field(default=2, ge=0, le=100)
    warm_up_s: float = Field(default=0.0, ge=0.0, le=600.0)
    seed: int = Field(default=0, ge=0)
    storage: str | None = Field(default=None, repr=False)

    def as_data(self) -> dict[str, Any]:
        """Return the study as plain data, in which a password in ``storage`` is masked."""
        data = self.model_dump(mode="json", by_alias=True)
        if self.storage is not None:
            data["storage"] = without_secrets(self.storage)
        return data

    def to_yaml(self) -> str:
        """Return the study as YAML that :func:`load_sweep` reads back, without a password."""
        data = self.as_data()
        for axis in AXES:
            # A conditional axis may be absent, and given without its condition it is refused.
            if axis.depends_on and axis.name not in self.space.model_fields_set:
                del data["space"][axis.name]
        return str(yaml.safe_dump(data, sort_keys=False))


def is_path(scenario: str) -> bool:
    """Return whether a scenario is given by the path of its file, and not by name."""
    return "/" in scenario or scenario.endswith((".yaml", ".yml"))


def scenario_label(scenario: str) -> str:
    """Return the name of a scenario that is given by name or by path."""
    return PurePath(scenario).stem if is_path(scenario) else scenario
