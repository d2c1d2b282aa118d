"""Events that a peer writes.

The number of a round is that of hivemind's global epoch after the round.
"""

from __future__ import annotations

from typing import Any, Literal

from rayhive.events.event import Event

#: What a round meant for a peer: ``averaged`` with the complete group, ``partial`` with some parts
#: missing, ``local`` with its own gradients after a failure, ``skipped`` without an optimizer step,
#: or ``alone`` because no other peer took part.
RoundOutcome = Literal["averaged", "partial", "local", "skipped", "alone"]


class Spawned(Event):
    """The forked peer process runs; sent to its actor, not stored.

    Attributes:
        pid: Process id.
    """

    kind: Literal["spawned"] = "spawned"
    pid: int


class DHTReady(Event):
    """The peer's DHT can be reached.

    Attributes:
        peer_id: hivemind's id of the peer.
        addresses: Multiaddresses at which it listens.
    """

    kind: Literal["dht_ready"] = "dht_ready"
    peer_id: str | None = None
    addresses: list[str]


class PeerReady(Event):
    """Data, model and optimizer of the peer are built, and it waits for the start of training.

    Attributes:
        shapes: Shape of each parameter, in order.
        dense_payload_bytes: Payload of the gradients without compression [bytes].
        dense_state_bytes: Size of all that state averaging averages, as float32 [bytes].
        predicted_payload_bytes_per_round: Predicted payload that the peer sends in a round [bytes].
        payload_exact: Whether the prediction is exact.
        compressed_tensors: Indices of the parameters that PowerSGD compresses.
        batch_size: Samples in a batch.
        target: ``metric``, ``value`` and ``mode`` of the workload's target.
        data: Source of the data, for example ``real``.
        device: Device that the peer trains on.
        processes: Role of each of its processes -> process id.
        versions: Installed version of each package.
        hardware: The peer's machine, on one line.
    """

    kind: Literal["peer_ready"] = "peer_ready"
    shapes: list[list[int]] | None = None
    dense_payload_bytes: float | None = None
    dense_state_bytes: float | None = None
    predicted_payload_bytes_per_round: float | None = None
    payload_exact: bool | None = None
    compressed_tensors: list[int] | None = None
    batch_size: int | None = None
    target: dict[str, Any] | None = None
    data: str | None = None
    device: str | None = None
    processes: dict[str, int] | None = None
    versions: dict[str, str | None] | None = None
    hardware: str | None = None


class TrainingStarted(Event):
    """The peer begins to train.

    Attributes:
        round: The round that it starts from.
    """

    kind: Literal["training_started"] = "training_started"
    round: int | None = None


class AveragingEvent(Event):
    """Fields of an averaging that ``round`` and ``state_round`` share.

    Attributes:
        group_size: Number of peers in the group.
        group: hivemind's ids of its members.
        fraction: Share of the parts that were averaged.
        excluded: Whether the peer's own tensors were refused.
        retries: Attempts after the first one.
        waited_s: Time that the peer waited for the result [s].
        matchmaking_s: Time until the group was formed [s].
        averaging_s: Time of the all-reduce [s].
        phases: Name, bytes and times of each phase of the all-reduce.
        banned: hivemind's ids of reducers that the peer gave up on.
        failures: Why parts were not averaged, by reducer.
        sent_bytes: Payload sent [bytes].
        received_bytes: Payload received [bytes].
        wasted_bytes: Payload of attempts that failed [bytes].
        counts_complete: Whether the byte counts are exact.
    """

    group_size: int | None = None
    group: list[str] | None = None
    fraction: float | None = None
    excluded: bool | None = None
    retries: int | None = None
    waited_s: float | None = None
    matchmaking_s: float | None = None
    averaging_s: float | None = None
    phases: list[Any] | None = None
    banned: list[Any] | None = None
    failures: list[Any] | None = None
    sent_bytes: float | None = None
    received_bytes: float | None = None
    wasted_bytes: float | None = None
    counts_complete: bool | None = None


class Round(AveragingEvent):
    """The gradients of a round were averaged, or the attempt ended in another way.

    With delayed gradients it comes later than the ``transition`` of the round.

    Attributes:
        round: Number of the round.
        samples: Own samples that entered the round.
        outcome: What the round meant for this peer.
        lost: Own samples that the round took and did not use.
        computed: Own samples computed so far, pending ones included.
        live_peers: Peers that the peer knew to be alive.
        accumulating_s: Time since the last transition [s].
        background_s: Part of ``accumulating_s`` spent waiting for background work [s].
        clock_s: Training time since ``training_started``, without evaluation [s].
        loss: Mean loss over the peer's batches since the last round.
        error: Error that ended the averaging.
    """

    kind: Literal["round"] = "round"
    round: int
    samples: int
    outcome: RoundOutcome
    lost: int | None = None
    computed: int | None = None
    live_peers: int | None = None
    accumulating_s: float | None = None
    background_s: float | None = None
    clock_s: float | None = None
    loss: float | None = None
    error: str | None = None


class StateRound(AveragingEvent):
    """The parameters and optimizer statistics were averaged, or the attempt failed.

    Attributes:
        round: Number of the round.
        outcome: ``averaged`` for a complete average, ``partial`` with some parts missing.
    """

    kind: Literal["state_round"] = "state_round"
    round: int
    outcome: Literal["averaged", "partial", "failed"]


class Transition(Event):
    """The peer goes on with the next round.

    Attributes:
        round: Number of the round that is over.
        seconds: Time since the previous transition, without evaluation [s].
        update_s: Time waited for the optimizer and for state averaging [s].
        clock_s: Training time since ``training_started``, without evaluation [s].
        computed: Own samples computed so far.
    """

    kind: Literal["transition"] = "transition"
    round: int
    seconds: float
    update_s: float | None = None
    clock_s: float | None = None
    computed: int | None = None


class Progress(Event):
    """Progress between two transitions, sent now and then.

    Attributes:
        computed: Own samples computed so far.
    """

    kind: Literal["progress"] = "progress"
    computed: int


class Weights(Event):
    """Fingerprint of the parameters after a round.

    Attributes:
        round: Number of the round.
        norm: Norm of all parameters.
        sketch: Random projections of the parameters: 64 numbers, see
            :mod:`rayhive.peer.weights_sketch`.
        finite: Whether all parameters are finite.
    """

    kind: Literal["weights"] = "weights"
    round: int
    norm: float | None = None
    sketch: list[float]
    finite: bool


class Evaluation(Event):
    """The model was evaluated.

    Attributes:
        round: Number of the last round.
        samples: Own samples computed so far.
        clock_s: Training time since ``training_started``, without evaluation [s].
        values: Metric -> value.
        final: Whether this is the evaluation after the last round.
    """

    kind: Literal["evaluation"] = "evaluation"
    round: int
    samples: int | None = None
    clock_s: float | None = None
    values: dict[str, float]
    final: bool | None = None


class StateLoaded(Event):
    """The peer took over the state of another peer.

    Attributes:
        round_before: Round that the peer was in.
        round_of_state: Round of the state that was loaded.
        round: Round that the peer goes on from.
        seconds: Time of the download [s].
        received_bytes: Bytes of states received [bytes].
        lost: Own samples that were thrown away.
        kept: Own samples that enter the next round.
    """

    kind: Literal["state_loaded"] = "state_loaded"
    round_before: int | None = None
    round_of_state: int | None = None
    round: int
    seconds: float
    received_bytes: float | None = None
    lost: int | None = None
    kept: int | None = None


class SteppedOut(Event):
    """The peer computes nothing for a while, and the other peers go on without it.

    Attributes:
        round: The last round that it finished.
    """

    kind: Literal["stepped_out"] = "stepped_out"
    round: int


class SteppedIn(Event):
    """The peer computes again after it stepped out.

    Attributes:
        round_before: Round that it was in.
        round: Round that it goes on from.
        seconds: Time between its two batches [s].
    """

    kind: Literal["stepped_in"] = "stepped_in"
    round_before: int | None = None
    round: int
    seconds: float


class Reunited(Event):
    """Two parts of the swarm that had lost each other train together again.

    Attributes:
        round_before: Round that the peer was in.
        round: Round that it goes on from.
        apart: Rounds that the peer did meanwhile: the weight of its parameters in the next average.
    """

    kind: Literal["reunited"] = "reunited"
    round_before: int | None = None
    round: int
    apart: int | None = None


class Fallback(Event):
    """The averaging of gradients failed.

    Attributes:
        round: Number of the round.
        reason: Why it failed.
        choice: ``local`` to apply the peer's own gradients, ``skip`` to apply none.
    """

    kind: Literal["fallback"] = "fallback"
    round: int
    reason: str | None = None
    choice: Literal["local", "skip"]


class FaultActed(Event):
    """A fault that is planned inside the peer process did its work.

    Attributes:
        fault: Id of the fault.
        round: Number of the round; None outside a round.
        what: What was done to the peer's part in the round.
    """

    kind: Literal["sabotaged"] = "sabotaged"
    fault: str
    round: int | None = None
    what: dict[str, Any] | None = None


class Rejected(Event):
    """Tensors of another peer were refused: they did not enter this peer's average or state.

    Attributes:
        round: Number of the round.
        offender: hivemind's id of the peer that sent them.
        tensors: ``gradients``, ``parameters`` or ``state``.
        reason: ``not_finite``, ``norm``, ``direction``, ``checksum``, ...
        norm: Norm of the tensors, if it is known.
        bound: Largest norm, or smallest ``lean``, that would have been accepted.
        lean: Mean cosine with the tensors of the other peers.
    """

    kind: Literal["rejected"] = "rejected"
    round: int | None = None
    offender: str | None = None
    tensors: str | None = None
    reason: str | None = None
    norm: float | None = None
    bound: float | None = None
    lean: float | None = None


class Notice(Event):
    """The peer was told that it will be taken away.

    Attributes:
        deadline_s: Time until then [s]; None for no deadline.
        fault: Id of the fault that gave the notice; None for a signal.
    """

    kind: Literal["notice"] = "notice"
    deadline_s: float | None = None
    fault: str | None = None


class Left(Event):
    """The peer left the swarm after a notice.

    Attributes:
        round: Number of the last round.
        handed_over: Own samples that were averaged after the notice.
        lost: Own samples that were computed and thrown away.
    """

    kind: Literal["left"] = "left"
    round: int
    handed_over: int | None = None
    lost: int | None = None


class Checkpoint(Event):
    """The peer wrote a checkpoint because it was asked to, or failed to.

    Attributes:
        round: Number of the last round.
        path: Path of the file.
        ok: Whether it was written.
        bytes: Size of the file [bytes].
        seconds: Time of writing [s].
        error: Name of the error, for example ``ENOSPC``; None if it was written.
    """

    kind: Literal["checkpoint"] = "checkpoint"
    round: int | None = None
    path: str | None = None
    ok: bool
    bytes: int | None = None
    seconds: float | None = None
    error: str | None = None


class PeerFinished(Event):
    """The peer ended its training.

    Attributes:
        reason: ``rounds``, ``target``, ``seconds``, ``stop``, ``diverged``, ``notice``, or the
            state for which the supervisor stopped it.
        round: Number of the last round.
        samples: Own samples computed.
        pending: Of these, samples that entered no round.
        clock_s: Training time since ``training_started``, without evaluation [s].
    """

    kind: Literal["peer_finished"] = "peer_finished"
    reason: str
    round: int
    samples: int
    pending: int | None = None
    clock_s: float | None = None


class PeerFailed(Event):
    """The peer failed.

    Attributes:
        error: The error.
        traceback: Its traceback.
    """

    kind: Literal["peer_failed"] = "peer_failed"
    error: str
    traceback: str | None = None
