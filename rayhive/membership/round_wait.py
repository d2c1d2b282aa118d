"""Short wait of a peer that has computed its share of a round, in place of one more batch.

A round begins when all peers have ended their batches. A batch that begins just before the round is
due thus delays it by almost the time of a batch, and the round has more samples than were asked
for. Peers of equal speed reach their shares at almost the same time; each but the last would begin
such a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rayhive.membership.progress_view import ROUND_CHECK_S, ProgressView

#: Longest wait, in batches of this peer and in seconds.
BATCHES = 2
LONGEST_S = 5.0
#: Most rounds without a wait after waits in vain.
MOST_SKIPPED = 64


@dataclass
class RoundWait:
    """Decides when this peer waits for a round to become due, and for how long.

    It waits once a round, for the time of two of its batches at most. After a wait in vain, such as
    where the batches do not divide the round, the next rounds have none: no round after the first
    of them, one after the second, and twice as many after each further one.

    Args:
        swarm: Progress of the swarm.
    """

    swarm: ProgressView
    _decided: int = -1
    _in_vain: int = 0
    _resumes: int = 0

    def seconds(self, batch: int) -> float:
        """Return how long to wait before the next batch at most [s]; 0 to begin it now.

        Args:
            batch: Samples of this peer's batches.
        """
        own = self.swarm.view.own
        if own.round < max(self._decided + 1, self._resumes) or self.swarm.is_round_due:
            return 0.0
        share = self.swarm.share_by_speed()
        if share is None or own.samples + batch / 2 < share:
            return 0.0
        self._decided = own.round
        return min(BATCHES * batch / own.samples_per_second, LONGEST_S)

    def wait(self, seconds: float, check: Callable[[], None]) -> None:
        """Wait until the round is due.

        Args:
            seconds: Longest wait [s].
            check: Called about every 0.1 s; an error that it raises ends the wait.
        """
        swarm, deadline = self.swarm, time.monotonic() + seconds
        with swarm.view.lock:
            while not (due := swarm.is_round_due) and not swarm.ended.is_set():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                swarm.view.lock.wait(min(left, ROUND_CHECK_S))
                check()
        self._in_vain = 0 if due else self._in_vain + 1
        skipped = 0 if self._in_vain < 2 else min(MOST_SKIPPED, 2 ** (self._in_vain - 2))
        self._resumes = self._decided + 1 + skipped
