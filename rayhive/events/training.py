"""Events of the training of a peer, written by the peer itself.

The number of a round is that of hivemind's global epoch after the round.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from rayhive.events.event import ByteCount, Event

#: Result of a round for a peer: ``averaged`` with the complete group, ``partial`` with some parts
#: missing, ``local`` with its own gradients after a failure, ``skipped`` without an optimizer step,
#: or ``alone`` because no other peer took part.
RoundOutcome = Literal["averaged", "partial", "local", "skipped", "alone"]
#: Reasons for which parameters are averaged, see :class:`StateRound`.
AveragingReason: TypeAlias = Literal[
    "period", "partition", "failed_round", "joined", "replicas_differ"
]


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
    sent_bytes: ByteCount | None = None
    received_bytes: ByteCount | None = None
    wasted_bytes: ByteCount | None = None
    counts_complete: bool | None = None


class Round(AveragingEvent, kind="round"):
    """The gradients of a round were averaged, or the attempt ended in another way.

    With delayed gradients it comes later than the ``transition`` of the round.

    Attributes:
        round: Number of the round.
        samples: Own samples that entered the round.
        outcome: Result of the round for this peer.
        lost: Own samples that the round took and did not use.
        computed: Own samples computed so far, pending ones included.
        live_peers: Peers that the peer knew to be alive.
        accumulating_s: Time since the last transition [s].
        background_s: Part of ``accumulating_s`` spent waiting for background work [s].
        clock_s: Training time since ``training_started``, without evaluation [s].
        loss: Mean loss over the peer's batches since the last round.
        error: Error that ended the averaging.
    """

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


class StateRound(AveragingEvent, kind="state_round"):
    """The parameters and optimizer statistics were averaged, or the attempt failed.

    Attributes:
        round: Number of the round.
        outcome: ``averaged`` for a complete average, ``partial`` with some parts missing.
        reason: ``period`` by schedule, ``partition`` after peers that had lost each other met
            again, ``failed_round`` after an averaging that failed or was partial, ``joined`` after
            a peer loaded a state, ``replicas_differ`` after peers compared fingerprints.
    """

    round: int
    outcome: Literal["averaged", "partial", "failed"]
    reason: AveragingReason | None = None


class Transition(Event, kind="transition"):
    """The peer goes on with the next round.

    Attributes:
        round: Number of the round that is over.
        seconds: Time since the previous transition, without evaluation [s].
        update_s: Time waited for the optimizer and for state averaging [s].
        clock_s: Training time since ``training_started``, without evaluation [s].
        computed: Own samples computed so far.
    """

    round: int
    seconds: float
    update_s: float | None = None
    clock_s: float | None = None
    computed: int | None = None


class Progress(Event, kind="progress"):
    """Progress between two transitions, sent now and then.

    Attributes:
        computed: Own samples computed so far.
    """

    computed: int


class Weights(Event, kind="weights"):
    """Fingerprint of the parameters after a round.

    Attributes:
        round: Number of the round.
        norm: Norm of all parameters.
        sketch: Random projections of the parameters: 64 numbers, see
            :mod:`rayhive.peer.measurements`.
        finite: Whether all parameters are finite.
    """

    round: int
    norm: float | None = None
    sketch: list[float]
    finite: bool

    def distance(self, other: Weights) -> float:
        """Estimate the distance of two peers' weights, relative to the larger norm."""
        scale = max(self.norm or 0.0, other.norm or 0.0)
        return math.dist(self.sketch, other.sketch) / scale if scale else 0.0


class Evaluation(Event, kind="evaluation"):
    """The model was evaluated.

    Attributes:
        round: Number of the last round.
        samples: Own samples computed so far.
        clock_s: Training time since ``training_started``, without evaluation [s].
        values: Metric -> value.
        final: Whether this is the evaluation after the last round.
    """

    round: int
    samples: int | None = None
    clock_s: float | None = None
    values: dict[str, float]
    final: bool | None = None


class Fallback(Event, kind="fallback"):
    """The averaging of gradients failed.

    Attributes:
        round: Number of the round.
        reason: Why it failed.
        choice: ``local`` to apply the peer's own gradients, ``skip`` to apply none.
    """

    round: int
    reason: str | None = None
    choice: Literal["local", "skip"]


class FaultActed(Event, kind="sabotaged"):
    """A fault that is planned inside the peer process did its work.

    Attributes:
        fault: Id of the fault.
        round: Number of the round; None outside a round.
        what: Details of the act; they depend on the kind of fault.
    """

    fault: str
    round: int | None = None
    what: dict[str, Any] | None = None


class Rejected(Event, kind="rejected"):
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

    round: int | None = None
    offender: str | None = None
    tensors: str | None = None
    reason: str | None = None
    norm: float | None = None
    bound: float | None = None
    lean: float | None = None
