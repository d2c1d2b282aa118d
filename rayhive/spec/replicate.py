"""Specs that are sent downwards: of a replicate to its supervisor, of a peer to its process."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rayhive.spec.configuration import Configuration
from rayhive.spec.fault_plan import FaultPlan, PlannedFault
from rayhive.spec.model import Model
from rayhive.spec.moved import moved_to_configuration
from rayhive.spec.pruning import EarlyStop
from rayhive.spec.study import (
    Budget,
    ElasticConfig,
    Evaluation,
    LocalSGDConfig,
    PreemptionConfig,
    Timeouts,
    WorkloadConfig,
)
from rayhive.spec.swarm import SwarmConfig

#: Longest training time of a replicate with faults, as a multiple of its seconds: faults may be
#: delayed.
LONGEST = 2.0


def baseline_label(name: str) -> str:
    """Return the name of a baseline in the column ``configuration``."""
    return f"{name} (baseline)"


class TrainingSpec(Model):
    """Settings that a replicate passes on to each of its peers; earlier versions are read, too.

    Attributes:
        seed: Seed of data order and parameters. It is the same for all configurations of a
            replicate number, so that rows differ by configuration alone.
        baseline: Name of the baseline that trains instead of the swarm; None for the swarm.
        elastic: Settings of the baseline ``elastic``.
        local_sgd: Settings of the baseline ``local-sgd``.
        directory: Working directory of the driver; also that of the peers, on every node that has
            it. None is the one in which a peer starts.
    """

    seed: int = 0
    workload: WorkloadConfig
    swarm: SwarmConfig
    configuration: Configuration
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    baseline: str | None = None
    elastic: ElasticConfig = ElasticConfig()
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    directory: str | None = None

    @property
    def round_size(self) -> int:
        """Samples of a round, over the swarm."""
        target = self.swarm.target_batch_size
        if self.baseline == "local-sgd":
            return target * self.local_sgd.local_steps
        return self.configuration.round_size(target)

    @model_validator(mode="before")
    @classmethod
    def _with_all_axes(cls, data: Any) -> Any:
        return moved_to_configuration(data)


class ReplicateSpec(TrainingSpec):
    """One repetition of a configuration under one scenario with one seed.

    Attributes:
        study: Name of the study.
        trial: Number of the trial in the study; None for a baseline.
        replicate: Number of the replicate in the trial and scenario, from 0.
        attempt: Number of earlier attempts at the replicate.
        scenario: Name of the fault scenario.
        plan: Fault plan; None without faults.
        early_stop: Bounds at which it is stopped as hopeless; None without any.
        timeouts: Limits of the phases before and after training; measurements do not depend on
            them.
        preemption: Reaction to real preemption notices.
        folder: Absolute path of the replicate's folder on the driver's node.
        code: Digest of the user's code and data; None if there is neither.
        git_revision: Git revision of the driver's code; nodes may lack its history.
    """

    study: str
    trial: int | None = Field(default=None, ge=0)
    replicate: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    scenario: str = "none"
    plan: FaultPlan | None = None
    early_stop: EarlyStop | None = None
    timeouts: Timeouts = Timeouts()
    preemption: PreemptionConfig = PreemptionConfig()
    folder: str
    code: str | None = None
    git_revision: str | None = None

    @model_validator(mode="after")
    def _has_a_place(self) -> ReplicateSpec:
        if (self.trial is None) == (self.baseline is None):
            raise ValueError("a replicate is either of a trial or of a baseline")
        return self

    @property
    def label(self) -> str:
        """Name of what is trained: the configuration's, or that of the baseline."""
        if self.baseline is not None:
            return baseline_label(self.baseline)
        return self.configuration.label

    @property
    def place(self) -> str:
        """Name of the folder of its trial or baseline: the number, or the name."""
        return str(self.trial) if self.baseline is None else self.baseline

    @property
    def title(self) -> str:
        """Name of the trial or baseline in messages: ``trial 3``, ``baseline ddp``."""
        return f"trial {self.trial}" if self.baseline is None else f"baseline {self.baseline}"

    @property
    def trains_together(self) -> bool:
        """Whether all peers train, so that they come to the last round at about the same time."""
        return self.baseline != "single"

    @property
    def meets_at_supervisor(self) -> bool:
        """Whether the peers meet at a store of the supervisor, which outlives all of them."""
        return self.baseline == "elastic"

    @property
    def run_id(self) -> str:
        """Name, unique among attempts: the DHT prefix and the name of the supervisor actor."""
        place = f"t{self.trial}" if self.baseline is None else self.baseline
        name = f"{self.study}-{place}-r{self.replicate}-{self.scenario}-a{self.attempt}"
        return name.replace(".", "_")

    @property
    def replicas(self) -> int:
        """Number of replicas: peers that start together, and peers that join in the plan."""
        joins = () if self.plan is None else self.plan.joins
        return max((self.swarm.peers, *(number + 1 for number in joins)))

    def in_own_rounds(self, plan: FaultPlan | None) -> FaultPlan | None:
        """Return a scenario's plan, which is for rounds of gradients, for rounds of this replicate.

        Args:
            plan: The plan; None for no faults.
        """
        target = self.swarm.target_batch_size
        return None if plan is None else plan.in_rounds_of(self.round_size, planned=target)

    def peer_spec(self, peer: int, incarnation: int = 0) -> PeerSpec:
        """Return the spec of one incarnation of a peer.

        Args:
            peer: Number of the peer.
            incarnation: Number of the incarnation, from 0.
        """
        planned = () if self.plan is None or incarnation else self.plan.faults
        settings = {name: getattr(self, name) for name in TrainingSpec.model_fields}
        if self.plan is not None and self.plan.faults:  # the supervisor ends training earlier
            longest = LONGEST * self.budget.seconds_per_replicate
            settings["budget"] = self.budget.model_copy(update={"seconds_per_replicate": longest})
        return PeerSpec(
            **settings,
            run_id=self.run_id,
            peer=peer,
            incarnation=incarnation,
            peers=self.swarm.peers,
            replicas=self.replicas,
            faults=tuple(fault for fault in planned if f"peer-{peer}" in fault.who),
        )


class PeerSpec(TrainingSpec):
    """Settings of one peer process.

    Attributes:
        run_id: Prefix of all its DHT keys.
        peer: Number of the peer in the swarm, from 0; peer 0 is the first bootstrap peer.
        incarnation: Number of the incarnation, from 0.
        peers: Number of peers that start together.
        replicas: Number of replicas, including peers that join later; None if none joins later.
        faults: Faults that are planned for the peer. The peer injects those inside the training.
        host: Address on which the peer listens, and which it announces.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
    """

    run_id: str
    peer: int = Field(ge=0)
    incarnation: int = Field(default=0, ge=0)
    peers: int = Field(ge=1)
    replicas: int | None = Field(default=None, ge=1)
    faults: tuple[PlannedFault, ...] = ()
    host: str = "127.0.0.1"
    accelerator: str = "auto"

    @property
    def name(self) -> str:
        """Name of the incarnation in events: ``peer-0``, and ``peer-0.1`` after a restart.

        Rounds, samples and clock of each incarnation start from zero.
        """
        return f"{self.replica}.{self.incarnation}" if self.incarnation else self.replica

    @property
    def replica(self) -> str:
        """Name of the replica, for example ``peer-0``, as in fault plans."""
        return f"peer-{self.peer}"

    @property
    def joins(self) -> bool:
        """Whether the peer joins a swarm that trains already."""
        return self.incarnation > 0 or self.peer >= self.peers

    @property
    def data_index(self) -> int:
        """Index of the peer's share of the data; a later incarnation has a share of its own."""
        return self.peer + self.incarnation * max(self.peers, self.replicas or 0)

    @property
    def rounds(self) -> int | None:
        """Number of rounds after which the budget of samples is spent; None without one."""
        return self.budget.rounds(self.round_size)

    @property
    def evaluate_every_rounds(self) -> int:
        """Number of rounds between two evaluations, from their number of committed samples."""
        return self.evaluation.rounds(self.round_size)
