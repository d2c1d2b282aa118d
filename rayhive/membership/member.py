"""A peer as group formation knows it."""

from __future__ import annotations

from typing import NamedTuple

#: Rounds that a peer may be behind and still be awaited: one behind by two finishes the round
#: before. A peer further behind has to download the state.
ROUNDS_BEHIND = 2


class Member(NamedTuple):
    """A live peer that takes part in the run.

    Attributes:
        peer_id: Its id.
        client_mode: Whether it cannot be called, and so cannot lead a group.
        round: The last round that it has finished.
        averaged: The last round whose averaging it has finished or given up.
        met: The last round that it has averaged in a group.
        entered: The last round that it has begun to average; before that it computes. None if it
            comes to this averaging from another one, and so at once.
    """

    peer_id: bytes
    client_mode: bool
    round: int
    averaged: int
    met: int
    entered: int | None = None

    def computes(self, round_: int) -> bool:
        """Return whether the peer still computes its part of a round."""
        return self.entered is not None and self.entered < round_
