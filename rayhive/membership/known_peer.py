"""Another peer, as a membership view knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rayhive.membership.announcements import Heartbeat

#: Time for which a dead peer is remembered that had left the run [s]. It is still called meanwhile.
LEFT_S = 60.0


@dataclass
class KnownPeer:
    """Another peer as a view knows it; times are of the view's clock [s].

    Attributes:
        heartbeat: Its newest announcement.
        received: Time at which it lived for certain: of its last message, or of the newest
            announcement that came through other peers.
        announced: Time of its newest announcement, also if that came through other peers.
        left: Whether it has left the run, to end or to load a state.
        progressed: Time of its last progress.
        returned: Time at which it became known, or came back.
        unreachable: Whether it was given up and not heard of since.
        lost_at: Time at which it was given up.
        lost_in: This peer's last finished round when it was lost; None if it was not.
        met: Last round in which it was in a group with this peer.
        left_out: Last round that a group with this peer began without it, by a quorum.
        unmet: Last round in which this peer awaited it and no group formed.
        unmet_until: Time until which its announcement of that round's end may be under way.
    """

    heartbeat: Heartbeat
    received: float
    progressed: float
    returned: float
    announced: float = -math.inf
    left: bool = False
    unreachable: bool = False
    lost_at: float = -math.inf
    lost_in: int | None = None
    met: int = 0
    left_out: int = 0
    unmet: int = 0
    unmet_until: float = -math.inf

    def take(self, heartbeat: Heartbeat, announced: float) -> None:
        """Take in a newer announcement, made at this time [s]."""
        self.left = (self.left or self.heartbeat.in_run) and not heartbeat.in_run
        self.heartbeat, self.announced = heartbeat, max(self.announced, announced)

    def is_recent(self, now: float, seconds: float) -> bool:
        """Return whether it lived in the last seconds, for which a dead peer is remembered."""
        return now - self.received <= (min(seconds, LEFT_S) if self.left else seconds)

    def reached(self, now: float) -> int:
        """Return the last round that it has finished, as far as this peer knows.

        A round without a group leaves both without news of each other. An awaited peer has probably
        ended it, too, and a short round is over before the message comes that says so.
        """
        reached = max(self.heartbeat.round, self.met - 1)
        if self.heartbeat.averaged < self.unmet and now < self.unmet_until:
            reached = max(reached, self.unmet - 1)
        return reached

    def has_begun(self, round_: int) -> bool:
        """Return whether it has begun to average the gradients of a round, as far as known."""
        return max(self.met, self.heartbeat.averaged, self.heartbeat.entered) >= round_

    def was_passed_on(self, since: float) -> bool:
        """Return whether other peers passed on an announcement of it, made after its loss.

        Args:
            since: Time after which it was made [s].
        """
        return self.announced > max(self.lost_at, since)

    @property
    def is_left_out(self) -> bool:
        """Whether a round began without it, which it has not caught up with since."""
        return self.heartbeat.round < self.left_out
