"""Commands of a supervisor to a peer: each is one line of JSON, told apart by ``do``."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import TypeAdapter

from rayhive.spec.model import Model


class Start(Model):
    """Join the swarm at these addresses; without any, the peer is the first of its swarm."""

    do: Literal["start"] = "start"
    initial_peers: tuple[str, ...] = ()


class Train(Model):
    """Begin to train."""

    do: Literal["train"] = "train"


class Stop(Model):
    """Stop training, for the reason that ``peer_finished`` reports."""

    do: Literal["stop"] = "stop"
    reason: str = "stop"


class Shutdown(Model):
    """End the process, after training."""

    do: Literal["shutdown"] = "shutdown"


class Leave(Model):
    """Hand over the samples in the present round, and leave."""

    do: Literal["leave"] = "leave"
    fault: str | None = None
    source: str | None = None


class GiveNotice(Model):
    """Leave within ``deadline_s`` seconds."""

    do: Literal["notice"] = "notice"
    deadline_s: float
    fault: str | None = None
    source: str | None = None


class Resume(Model):
    """Go on where an earlier training process of the same peer ended; of no use to a supervisor.

    Attributes:
        training: Whether the peer has begun to train.
        round: Last round that it has reported.
        computed: Samples that it has computed.
        pending: Of these, samples that are in no round.
        rounds: Rounds since its newest checkpoint, each with its own samples in it.
        clock_s: Its training clock when this command is sent [s].
        round_ended_s: Its training clock at the end of its last round [s].
        sent_s: When this command is sent [s of ``time.monotonic``].
        ended_s: When the process before ended [s of ``time.monotonic``]; None for the first.
    """

    do: Literal["resume"] = "resume"
    training: bool = False
    round: int = 0
    computed: int = 0
    pending: int = 0
    rounds: tuple[tuple[int, int], ...] = ()
    clock_s: float = 0.0
    round_ended_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float | None = None


class WriteCheckpoint(Model):
    """Write a checkpoint between two batches, and report the result."""

    do: Literal["checkpoint"] = "checkpoint"
    fault: str | None = None


#: Commands that a fault sends; ``fault`` is its id. A real notice names its ``source`` instead.
FaultCommand: TypeAlias = Leave | GiveNotice | WriteCheckpoint
Command: TypeAlias = Start | Train | Stop | Shutdown | Resume | FaultCommand
#: Reads a command from its JSON.
COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)
