"""Events of the life cycle of a peer, written by the peer itself.

The number of a round is that of hivemind's global epoch after the round.
"""

from __future__ import annotations

from typing import Any

from rayhive.events.event import ByteCount, Event


class Spawned(Event, kind="spawned"):
    """The forked peer process runs; sent to its actor, not stored.

    Attributes:
        pid: Process id.
    """

    pid: int


class DHTReady(Event, kind="dht_ready"):
    """The peer's DHT can be reached.

    Attributes:
        peer_id: hivemind's id of the peer.
        addresses: Multiaddresses at which it listens.
    """

    peer_id: str | None = None
    addresses: list[str]


class PeerReady(Event, kind="peer_ready"):
    """Data, model and optimizer of the peer are built, and it waits for the start of training.

    Attributes:
        shapes: Shape of each parameter, in order.
        dense_payload_bytes: Payload of the gradients, and of extra tensors that travel with them,
            without compression [bytes].
        dense_state_bytes: Size of all that state averaging averages, as float32 [bytes].
        predicted_payload_bytes_per_round: Predicted payload that a peer sends in a round, as the
            mean over the peers [bytes].
        payload_exact: Whether the prediction is exact.
        compressed_tensors: Indices of the parameters that PowerSGD compresses.
        batch_size: Samples in a batch.
        target: ``metric``, ``value`` and ``mode`` of the workload's target.
        data: Source of the data, for example ``real``.
        device: Device that the peer trains on.
        processes: Role of each of its processes -> process id.
        versions: Installed version of each package.
        hardware: The peer's machine, on one line; only in old logs, see ``peer_spawned``.
        arithmetic: What decides how the peer rounds, on one line. Peers with the same value compute
            equal bits from equal bits.
        trains: Whether it is going to train; a peer of the baseline ``single`` may hold its node.
    """

    shapes: list[list[int]] | None = None
    dense_payload_bytes: ByteCount | None = None
    dense_state_bytes: ByteCount | None = None
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
    arithmetic: str | None = None
    trains: bool = True


class TrainingStarted(Event, kind="training_started"):
    """The peer begins to train.

    Attributes:
        round: The round that it starts from.
    """

    round: int | None = None


class SteppedOut(Event, kind="stepped_out"):
    """The peer computes nothing for a while, and the other peers go on without it.

    Attributes:
        round: The last round that it finished.
    """

    round: int


class SteppedIn(Event, kind="stepped_in"):
    """The peer computes again after it stepped out.

    Attributes:
        round_before: Round that it was in.
        round: Round that it goes on from.
        seconds: Time between its two batches [s].
    """

    round_before: int | None = None
    round: int
    seconds: float


class StateLoaded(Event, kind="state_loaded"):
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

    round_before: int | None = None
    round_of_state: int | None = None
    round: int
    seconds: float
    received_bytes: ByteCount | None = None
    lost: int | None = None
    kept: int | None = None


class RolledBack(Event, kind="rolled_back"):
    """The training goes on from a checkpoint in a new process; the rounds since then are undone.

    Attributes:
        round_before: Last round that the peer had reported.
        round: Round of the checkpoint; 0 without one: training begins again.
        group: Names of the incarnations that go on together. Other peers' rounds since the
            checkpoint are undone, too.
        seconds: Time from the end of the process before [s].
        load_s: Part of it in which the members exchanged the checkpoint [s].
        received_bytes: Size of the checkpoint, if another member sent it [bytes].
        lost: Own samples that no longer count: those of undone rounds, and pending ones.
    """

    round_before: int | None = None
    round: int
    group: list[str]
    seconds: float
    load_s: float | None = None
    received_bytes: ByteCount | None = None
    lost: int


class Reunited(Event, kind="reunited"):
    """Two parts of the swarm that had lost each other train together again.

    Attributes:
        round_before: Round that the peer was in.
        round: Round that it goes on from.
        apart: Rounds that the peer did meanwhile: the weight of its parameters in the next average.
    """

    round_before: int | None = None
    round: int
    apart: int | None = None


class Notice(Event, kind="notice"):
    """The peer was told that it will be taken away.

    Attributes:
        deadline_s: Time until then [s]; None for no deadline.
        fault: Id of the fault that gave the notice; None for a signal and for a real notice.
        source: Source of a real notice, see ``node_notice``; None for an injected one.
    """

    deadline_s: float | None = None
    fault: str | None = None
    source: str | None = None


class Left(Event, kind="left"):
    """The peer left the swarm after a notice.

    Attributes:
        round: Number of the last round.
        handed_over: Own samples that were averaged after the notice.
        lost: Own samples that were computed and thrown away.
    """

    round: int
    handed_over: int | None = None
    lost: int | None = None


class Checkpoint(Event, kind="checkpoint"):
    """The peer wrote a checkpoint, or failed to.

    Attributes:
        round: Number of the last round.
        path: Path of the file.
        ok: Whether it was written.
        bytes: Size of the file [bytes].
        seconds: Time of writing [s].
        error: Name of the error, for example ``ENOSPC``; None if it was written.
    """

    round: int | None = None
    path: str | None = None
    ok: bool
    bytes: ByteCount | None = None
    seconds: float | None = None
    error: str | None = None


class PeerFinished(Event, kind="peer_finished"):
    """The peer ended its training.

    Attributes:
        reason: ``rounds``, ``target``, ``seconds``, ``stop``, ``diverged``, ``notice``, or the
            state for which the supervisor stopped it.
        round: Number of the last round.
        samples: Own samples computed.
        pending: Of these, samples that entered no round.
        clock_s: Training time since ``training_started``, without evaluation [s].
    """

    reason: str
    round: int
    samples: int
    pending: int | None = None
    clock_s: float | None = None


class PeerFailed(Event, kind="peer_failed"):
    """The peer failed.

    Attributes:
        error: The error.
        traceback: Its traceback.
    """

    error: str
    traceback: str | None = None
