"""Promise and short wait of a peer, in place of batches that a round does not need.

A round begins when all peers have ended their batches. A batch that begins just before the round is
due thus delays it by almost the time of a batch, and the round has more samples than were asked
for. Peers of equal speed reach their shares at almost the same time; each but the last would begin
such a batch.

News of a peer's last batch come late over a slow link, and the others would compute on until then.
A peer therefore promises its share before it has computed it.
"""

from __future__ import annotations

import math
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
    """Decides about the promises of a peer, and about its waits for a round to become due.

    It waits once a round, for the time of two of its batches and of news at most. After a wait in
    vain, such as where the batches do not divide the round, the next rounds have none: no round
    after the first of them, one after the second, and twice as many after each further one.

    Args:
        swarm: Progress of the swarm.
        news_s: How long news are under way between peers [s].
    """

    swarm: ProgressView
    news_s: float = 0.0
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
        if own.samples < own.promised:
            return 0.0
        batches = self.swarm.batches_by_speed(batch)
        if batches is None or own.samples < batches * batch:
            return 0.0
        self._decided = own.round
        return min(BATCHES * batch / own.samples_per_second + self.news_s, LONGEST_S)

    def news(self, samples: int, batch: int, announced: int) -> tuple[bool, int]:
        """Return the news of this peer after a batch.

        A peer promises its share of the round before its last batch. Where news take longer than a
        batch, it does so once its further batches take no longer than news. Other samples are told
        when the unknown ones are this peer's share of the samples that the round lacks: before
        that, it cannot be due. Peers of equal speed send one announcement a round.

        Args:
            samples: Samples that this peer has for the round.
            batch: Samples of its batches; 0 if they are not known.
            announced: Samples that the others know of or were promised.

        Returns:
            Whether to tell them now, and the samples that this peer promises for the round.
        """
        own, swarm = self.swarm.view.own, self.swarm
        if not own.promised and batch and swarm.share_of_lacking(samples) > 0:  # it is not due
            batches = swarm.batches_by_speed(batch)
            if batches is not None and samples < batches * batch:
                left = math.ceil(batches - samples / batch) * batch
                soon = max(batch, self.news_s * own.samples_per_second)
                promised = samples + left if left <= soon else 0
                return bool(promised), promised
        unknown = samples - announced
        return 0 < unknown >= swarm.share_of_lacking(announced), own.promised

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
