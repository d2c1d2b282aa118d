"""Calls of the membership protocol to one peer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A call to make.

    Attributes:
        peer: Id of the called peer.
        began: Time at which it begins [s].
        lost: Whether the peer was given up: the connection to it has to be made anew.
        check: Whether it only finds out if the peer lives.
    """

    peer: bytes
    began: float
    lost: bool = False
    check: bool = False


@dataclass(eq=False)
class Lane:
    """Calls to one peer; times are of the protocol's clock [s].

    Attributes:
        due: Time of the next call without news.
        answered: Time of the last answer.
        running: Number of calls under way.
        failures: Failed calls in a row.
        failed: Time of the last failure that counted.
        began: Time of the last call.
        news: Whether there may be news for the peer.
    """

    due: float
    answered: float
    running: int = 0
    failures: int = 0
    failed: float = -math.inf
    began: float = -math.inf
    news: bool = False
