"""Another peer, as a membership view knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayhive.membership.announcements import Heartbeat


@dataclass
class KnownPeer:
    """Another peer as a view knows it; times are of the view's clock [s].

    Attributes:
        heartbeat: Its newest announcement.
        received: Time at which it lived for certain: of its last message, or of the newest
            announcement that came through other peers.
        progressed: Time of its last progress.
        returned: Time at which it became known, or came back.
        unreachable: Whether it was given up and not heard of since.
        lost_at: Time at which it was given up.
        lost_in: This peer's last finished round when it was lost; None if it was not.
        met: Last round in which it was in a group with this peer.
        left_out: Last round that a group with this peer began without it, by a quorum.
    """

    heartbeat: Heartbeat
    received: float
    progressed: float
    returned: float
    unreachable: bool = False
    lost_at: float = -math.inf
    lost_in: int | None = None
    met: int = 0
    left_out: int = 0
