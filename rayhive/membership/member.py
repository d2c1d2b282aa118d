"""A member of the run, as group formation has to know it."""

from __future__ import annotations

from typing import NamedTuple

#: Rounds that a peer may be behind and still be awaited: one behind by two finishes the round
#: before. A peer further behind has to load the state.
ROUNDS_BEHIND = 2


class Member(NamedTuple):
    """A live peer that takes part in the run, as matchmaking has to know it.

    Attributes:
        peer_id: Its identity.
        client_mode: Whether it cannot be called, and so cannot lead.
        round: The last round that it has finished.
        averaged: The last round whose averaging it has behind it, done or given up.
        met: The last round that it has averaged in a group.
        entered: The last round that it has come to; before, it computes. None if it comes to this
            averaging from another one, and so at once.
    """

    peer_id: bytes
    client_mode: bool
    round: int
    averaged: int
    met: int
    entered: int | None = None

    def computes(self, round_: int) -> bool:
        """Return whether it has not come to a round yet, because it still computes."""
        return self.entered is not None and self.entered < round_
