"""Departure of a peer after a preemption notice, without lost samples if there is time.

A notice does not stop training. The peer leaves after the last round that it can finish before the
deadline. If the deadline falls into a round, it asks the other peers to begin that round at once,
with the samples that are there.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable

from rayhive.events import GROUPED, Event, Round, Transition
from rayhive.peer.channel import Channel

#: Margin between the planned departure and the deadline [s]: estimates are not exact.
MARGIN_S = 0.5
#: Assumed time between SIGTERM and the SIGKILL that follows [s].
SIGTERM_S = 2.5


class Preemption:
    """Decides after each batch whether the peer has to leave.

    Args:
        channel: Source of the notice.
        clock: Monotonic time [s].
    """

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._batch_s = self._round_s = self._exchange_s = 0.0
        self._batch_began = clock()
        self.handed_over = 0

    def take_signals(self) -> None:
        """Treat SIGTERM as a notice from now on."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._channel.give_notice(SIGTERM_S))

    def begin_batch(self) -> None:
        """Note the start of a batch."""
        self._batch_began = self._clock()

    def note(self, event: Event) -> None:
        """Measure the times of a round, and the samples handed over, from an optimizer's event."""
        if isinstance(event, Round):
            self._exchange_s = max(event.waited_s or 0.0, self._exchange_s / 2)
            if self._channel.notice is not None and event.outcome in GROUPED:
                self.handed_over += event.samples
        elif isinstance(event, Transition):
            self._round_s = event.seconds
            self._exchange_s = max(self._exchange_s, event.update_s or 0.0)

    def is_due(self, pending: int, hand_over: Callable[[], None]) -> bool:
        """Return, after a batch, whether this peer has to leave now; hand over its samples first.

        Args:
            pending: Samples that are in no round yet.
            hand_over: Runs a round with the present samples.
        """
        now = self._clock()
        self._batch_s = max(now - self._batch_began, self._batch_s / 2)
        deadline = self._channel.notice
        if deadline is None:
            return False
        left_s = deadline - now
        if not pending:
            return math.isinf(left_s) or left_s < self._round_s + 2 * self._exchange_s + MARGIN_S
        # the other peers have to finish their present batch before they come to the round
        needed_s = self._batch_s + 2 * self._exchange_s + MARGIN_S
        if left_s > needed_s + self._batch_s:
            return False
        if left_s > self._exchange_s:
            hand_over()
        return True
