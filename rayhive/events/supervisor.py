"""Events that the supervisor of a replicate writes."""

from __future__ import annotations

from typing import Any, Literal

from rayhive.events.event import Event

#: Effect of a fault on its targets: ``none`` leaves them in the swarm, ``gone`` ends them,
#: ``stopped`` and ``cut_off`` keep them alive but apart from the other peers.
FaultEffect = Literal["none", "gone", "stopped", "cut_off"]
#: Step of a fault.
FaultPhase = Literal["setup", "inject", "verify", "heal", "teardown"]


class ReplicateStarted(Event, kind="replicate_started"):
    """The supervisor begins with the replicate.

    Attributes:
        spec: The whole ``ReplicateSpec``, ``git_revision`` included.
        versions: Installed version of each package.
        hardware: The supervisor's machine, on one line.
        boot: Id of the boot of its kernel, which has one clock.
    """

    spec: dict[str, Any]
    versions: dict[str, str | None] | None = None
    hardware: str | None = None
    boot: str | None = None


class PeerSpawned(Event, kind="peer_spawned"):
    """The process of an incarnation runs.

    Attributes:
        node: Ray's id of its node.
        host: Host name of its node.
        pid: Process id.
        slot: The replica, for example ``peer-1``.
        life: Number of the incarnation of this replica: 0, then 1, 2, ...
        cause: Id of the fault that started it; None for the peers that start together.
        boot: Id of the boot of its node's kernel; nodes with the same id have one clock.
        versions: Installed version of each package.
        hardware: The peer's machine, on one line.
    """

    node: str
    host: str
    pid: int
    slot: str | None = None
    life: int | None = None
    cause: str | None = None
    boot: str | None = None
    versions: dict[str, str | None] | None = None
    hardware: str | None = None


class BarrierReleased(Event, kind="barrier_released"):
    """All peers are ready, and training begins.

    Attributes:
        peers: Number of peers.
    """

    peers: int


class NodesShared(Event, kind="nodes_shared"):
    """Other replicates use the same nodes at the same time.

    Attributes:
        replicates: Run ids of the replicates that are new beside this one.
    """

    replicates: list[str]


class LinkCounted(Event, kind="link_counted"):
    """Counters of the network interfaces that the peers use; on a testbed only.

    Attributes:
        when: Start or end of training.
        nodes: Ray's id of a node -> ``tx_bytes``, ``rx_bytes``, ``tx_packets``, ``rx_packets`` and
            ``dropped`` of its interface.
    """

    when: Literal["start", "end"]
    nodes: dict[str, dict[str, int]]


class TrainingExtended(Event, kind="training_extended"):
    """Training went on after its budget of seconds, because faults were late.

    Attributes:
        seconds: Time after the end of the budget [s].
        slip_s: Greatest delay of a fault [s].
    """

    seconds: float
    slip_s: float


class PeerLost(Event, kind="peer_lost"):
    """The process of an incarnation ended without being asked to.

    Attributes:
        exit_code: Its exit code, negative for a signal; None if unknown.
        reason: Known reason of its end.
    """

    exit_code: int | None = None
    reason: str | None = None


class NodeNoticed(Event, kind="node_notice"):
    """Ray or a cloud announced that it will take a node away. This is real, and no fault of a plan.

    Attributes:
        node: Ray's id of the node.
        source: Name of the notice source.
        what: The announcement in the words of the source.
        deadline_s: Time until the node is taken away [s]; None if the source does not say it.
        certain: Whether the node will be taken away; False for a raised risk.
        lives: The incarnations on the node that were told to leave.
        drained: Whether Ray was told, so that it starts nothing on the node any more.
    """

    node: str
    source: str
    what: str
    deadline_s: float | None = None
    certain: bool
    lives: list[str]
    drained: bool


class FaultFired(Event, kind="fault_fired"):
    """A fault was injected.

    Attributes:
        fault: Id of the fault in the plan.
        fault_kind: Kind of the fault.
        effect: Effect on the targets.
        who: Replicas or nodes that the fault was aimed at.
        lives: The struck incarnations.
        planned: Planned time or round, as text.
        began: Unix time at which the injection began [s].
        done: Details of the injection; they depend on the kind of fault.
        slip_s: Delay of a fault that was planned by time [s].
        slip_rounds: Delay of a fault that was planned by round [rounds].
    """

    fault: str
    fault_kind: str
    effect: FaultEffect
    who: list[str] | None = None
    lives: list[str] | None = None
    planned: str | None = None
    began: float | None = None
    done: Any = None
    slip_s: float | None = None
    slip_rounds: float | None = None


class FaultVerified(Event, kind="fault_verified"):
    """The effect of a fault was checked.

    Attributes:
        fault: Id of the fault.
        ok: Whether the fault took effect.
        proof: The observations.
    """

    fault: str
    ok: bool
    proof: Any = None


class FaultHealed(Event, kind="fault_healed"):
    """A fault was healed.

    Attributes:
        fault: Id of the fault.
        lives: The present incarnations of its targets.
        done: Details of the heal; they depend on the kind of fault.
        seconds: Time since the fault fired [s].
    """

    fault: str
    lives: list[str] | None = None
    done: Any = None
    seconds: float | None = None


class FaultFailed(Event, kind="fault_failed"):
    """A step of a fault raised an error.

    Attributes:
        fault: Id of the fault.
        phase: The step.
        error: The error.
    """

    fault: str
    phase: FaultPhase | None = None
    error: str | None = None


class InvariantChecked(Event, kind="invariant"):
    """An invariant was checked at the end of the replicate.

    Attributes:
        name: Name of the invariant.
        ok: Whether it held.
        checked: Number of things that were checked.
        violations: A text for each violation.
    """

    name: str
    ok: bool
    checked: int | None = None
    violations: list[str] | None = None


class Pruned(Event, kind="pruned"):
    """The replicate is stopped early: others were better at the same samples.

    Attributes:
        metric: Metric of the held-out evaluations.
        value: Best value of the replicate so far, the mean over its peers.
        bar: Value that it was compared with.
        samples: Committed samples of the swarm at the last evaluation.
        round: Round of that evaluation.
        replicates: Finished replicates of other configurations that the bar was taken from.
        share: Share of them that the bar leaves worse [%].
        margin: How much worse the value had to be, as a share of the bar.
    """

    metric: str
    value: float
    bar: float
    samples: int
    round: int
    replicates: int
    share: float
    margin: float


class OutcomeFound(Event, kind="outcome"):
    """The outcome is known; it is that of the ``replicate_finished`` that follows the clean-up.

    Attributes:
        state: State of the replicate.
        stop_reason: Why it ended.
    """

    state: str
    stop_reason: str | None = None


class ReplicateFinished(Event, kind="replicate_finished"):
    """The replicate is over and its nodes are cleaned up.

    Attributes:
        state: ``completed``, ``timed_out``, ``diverged``, ``failed``, ``stopped``, ``invalid``,
            ``lost``, ``pruned`` or ``skipped``.
        stop_reason: Why it ended.
    """

    state: str
    stop_reason: str | None = None
