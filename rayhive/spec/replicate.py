"""What crosses a boundary downwards: a replicate for a supervisor, a peer for a peer process."""

from __future__ import annotations

from pydantic import Field

from rayhive.spec import (
    Budget,
    Configuration,
    Evaluation,
    Model,
    SwarmConfig,
    Timeouts,
    WorkloadConfig,
)
from rayhive.spec.fault_plan import FaultPlan, PlannedFault

#: A replicate with faults trains at most this many times its seconds: faults may come late.
LONGEST = 2.0


class ReplicateSpec(Model):
    """One repetition of a configuration under one scenario with one seed.

    Attributes:
        study: Name of the study.
        trial: Number of the trial in the study.
        replicate: Number of the replicate in the trial and scenario, from 0.
        attempt: 0, and one more each time that the replicate had to be run again.
        scenario: Name of the fault scenario.
        plan: What it breaks; None if nothing.
        seed: Seed of data order and parameters; the same for all configurations of a replicate
            number, so that rows differ by configuration alone.
        timeouts: Limits of the phases around training; they do not change what is measured.
        folder: Absolute path of the replicate's folder on the driver's node.
        code: Digest of the user's code and data; None where there is neither.
        git_revision: Of the driver's code, for the record: nodes may have it without its history.
        directory: Working directory of the driver, which is that of the peers, too, on every node
            that has it.
    """

    study: str
    trial: int = Field(ge=0)
    replicate: int = Field(ge=0)
    attempt: int = Field(default=0, ge=0)
    scenario: str = "none"
    plan: FaultPlan | None = None
    seed: int = 0
    workload: WorkloadConfig
    swarm: SwarmConfig
    configuration: Configuration
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    timeouts: Timeouts = Timeouts()
    folder: str
    code: str | None = None
    git_revision: str | None = None
    directory: str | None = None

    @property
    def run_id(self) -> str:
        """Name that is unique among attempts: the DHT prefix and the supervisor's actor name."""
        return (
            f"{self.study}-t{self.trial}-r{self.replicate}-{self.scenario}-a{self.attempt}".replace(
                ".", "_"
            )
        )

    @property
    def slots(self) -> int:
        """Number of logical peers: those that start together, and those that the plan brings."""
        joins = () if self.plan is None else self.plan.joins
        return max((self.swarm.peers, *(number + 1 for number in joins)))

    def peer_spec(self, peer: int, life: int = 0) -> PeerSpec:
        """Return what life number ``life`` of peer number ``peer`` of this replicate gets."""
        planned = () if self.plan is None or life else self.plan.faults
        budget = self.budget
        if self.plan is not None and self.plan.faults:  # the supervisor ends the training
            longest = LONGEST * budget.seconds_per_replicate
            budget = budget.model_copy(update={"seconds_per_replicate": longest})
        return PeerSpec(
            run_id=self.run_id,
            peer=peer,
            life=life,
            peers=self.swarm.peers,
            slots=self.slots,
            faults=tuple(fault for fault in planned if f"peer-{peer}" in fault.who),
            seed=self.seed,
            workload=self.workload,
            swarm=self.swarm,
            configuration=self.configuration,
            budget=budget,
            evaluation=self.evaluation,
            directory=self.directory,
        )


class PeerSpec(Model):
    """Everything that one peer process is told before it starts.

    Attributes:
        run_id: Prefix of all its DHT keys.
        peer: Its number in the swarm, from 0; peer 0 is the first bootstrap peer.
        life: 0, and one more each time that this peer was started again.
        peers: Number of peers that start together.
        slots: Number of peers, those that join later included; None if that is all of them.
        faults: Faults that are planned for it; it commits those of its kind ``inside`` itself.
        seed: Seed of the parameters (the same on all peers) and, with ``peer``, of the data.
        host: Address that it listens on and announces.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        directory: Its working directory, on a node that has it; None to stay where it starts.
    """

    run_id: str
    peer: int = Field(ge=0)
    life: int = Field(default=0, ge=0)
    peers: int = Field(ge=1)
    slots: int | None = Field(default=None, ge=1)
    faults: tuple[PlannedFault, ...] = ()
    seed: int = 0
    workload: WorkloadConfig
    swarm: SwarmConfig
    configuration: Configuration
    budget: Budget = Budget()
    evaluation: Evaluation = Evaluation()
    host: str = "127.0.0.1"
    accelerator: str = "auto"
    directory: str | None = None

    @property
    def name(self) -> str:
        """The peer's name in events: ``peer-0``, and ``peer-0.1`` when it was started again.

        Each life is a peer of its own in events: its rounds, samples and clock begin anew.
        """
        return self.slot if self.life == 0 else f"{self.slot}.{self.life}"

    @property
    def slot(self) -> str:
        """The logical peer, for example ``peer-0``: what a fault plan names."""
        return f"peer-{self.peer}"

    @property
    def joins(self) -> bool:
        """Whether it comes to a swarm that is training already."""
        return self.life > 0 or self.peer >= self.peers

    @property
    def data_index(self) -> int:
        """Its index among those who share the data; a later life is a joiner of its own there."""
        return self.peer + self.life * max(self.peers, self.slots or 0)

    @property
    def rounds(self) -> int | None:
        """Rounds after which the replicate is complete, from the budget of samples."""
        samples = self.budget.samples_per_replicate
        return None if samples is None else -(-samples // self.swarm.target_batch_size)

    @property
    def evaluate_every_rounds(self) -> int:
        """Rounds between two evaluations: a fixed count of committed samples."""
        return max(1, round(self.evaluation.every_samples / self.swarm.target_batch_size))
