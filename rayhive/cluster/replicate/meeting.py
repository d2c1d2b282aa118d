"""Store at which the peers of a baseline meet, in the supervisor, which outlives all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Longest wait for an answer of the store [s].
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Meeting:
    """Store that is open as long as this object lives.

    Attributes:
        store: torch's store.
        address: Its address, for the peers.
    """

    store: Any
    address: str


def open_meeting(host: str) -> Meeting:
    """Open a store.

    A user of torchrun who expects to lose any of the machines keeps it on one that stays. torch is
    imported here: no other replicate needs it in its supervisor.

    Args:
        host: Address of this node.
    """
    from rayhive.baselines.collectives import listening_store

    store, address = listening_store(host, 1, _ANSWER_S)
    return Meeting(store, address)
