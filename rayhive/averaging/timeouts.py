"""Timeouts of an averager, with defaults that do not follow the matchmaking window."""

from __future__ import annotations

from dataclasses import dataclass

#: Longest wait for a group member's next part [s], if no timeout is given.
SENDER_TIMEOUT = 10.0


@dataclass(frozen=True)
class AveragingTimeouts:
    """Timeouts of group formation and of an all-reduce [s].

    Attributes:
        request: Longest wait for a leader's answer.
        next_chunk: Longest wait for the next part of a state.
        sender: Longest wait of a reducer for a sender's next part.
        reducer: Longest wait of a sender for a reducer's answer.
    """

    request: float
    next_chunk: float
    sender: float
    reducer: float

    @classmethod
    def derived(
        cls,
        min_matchmaking_time: float,
        request_timeout: float = 3.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
    ) -> AveragingTimeouts:
        """Return the timeouts that follow from the arguments of hivemind's averager.

        Args:
            min_matchmaking_time: Matchmaking window [s].
            request_timeout: Longest wait for a leader's answer [s]. Cut to half the window: two
                peers that ask each other block until it ends.
            allreduce_timeout: Longest all-reduce [s].
            next_chunk_timeout: Longest wait for a part [s]. A value equal to the window counts as
                not given, because hivemind's optimizer passes the window by default. The default
                is a quarter of ``allreduce_timeout``, at most :data:`SENDER_TIMEOUT`, so that a
                round with a silent member ends before it is given up.
            sender_timeout: The same for senders only; default ``next_chunk_timeout``.
            reducer_timeout: Longest wait for a reducer's answer [s]; default twice the sender's.
        """
        if next_chunk_timeout is None or next_chunk_timeout == min_matchmaking_time:
            next_chunk_timeout = SENDER_TIMEOUT
            if allreduce_timeout is not None:
                next_chunk_timeout = min(next_chunk_timeout, allreduce_timeout / 4)
        sender = next_chunk_timeout if sender_timeout is None else sender_timeout
        return cls(
            request=min(request_timeout, 0.5 * min_matchmaking_time),
            next_chunk=next_chunk_timeout,
            sender=sender,
            reducer=2 * sender if reducer_timeout is None else reducer_timeout,
        )
