"""How a peer goes when it is told that it will be taken away: with nothing lost, if there is time.

A notice does not stop the training: a machine that is still there still computes. It leaves after
the last round that it can finish. If the deadline comes in the middle of one, it asks the others
to begin the round at once, with the samples that there are.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from rayhive.peer.channel import Channel

#: How long before the deadline a peer wants to be gone [s]: estimates are not exact.
MARGIN_S = 0.5
#: What a peer that got SIGTERM takes for its deadline [s]; the signal that follows is SIGKILL.
SIGTERM_S = 2.5


class Samples:
    """Keeps the books of a peer's samples: computed = entered + lost + pending, at any time."""

    def __init__(self) -> None:
        self.computed = self.entered = self.lost = 0

    @property
    def pending(self) -> int:
        """Samples that no round has had yet."""
        return self.computed - self.entered - self.lost

    def enter(self, samples: int, computed: int) -> int:
        """Note that a round had ``samples`` of the ``computed`` ones; return how many it lost."""
        lost = computed - self.entered - self.lost - samples
        self.entered += samples
        self.lost += lost
        return lost

    def drop(self, kept: int = 0) -> int:
        """Note that all that is pending but ``kept`` was thrown away; return how many that were."""
        dropped = self.pending - kept
        self.lost += dropped
        return dropped


class Preemption:
    """Decides when to leave, after each batch.

    Args:
        channel: Where the notice comes from.
        clock: Monotonic time [s].
    """

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._batch_s = self._round_s = self._exchange_s = 0.0
        self._batch_began = clock()
        self._noticed = False
        self.handed_over = 0

    def take_signals(self) -> None:
        """Take SIGTERM for a notice from now on."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._channel.give_notice(SIGTERM_S))

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        self._batch_began = self._clock()

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Learn from an event of the optimizer how long things take, and what was handed over."""
        if kind == "round":
            self._exchange_s = max(fields.get("waited_s") or 0.0, self._exchange_s / 2)
            if self._channel.notice is not None and fields["outcome"] in ("averaged", "partial"):
                self.handed_over += fields["samples"]
        elif kind == "transition":
            self._round_s = fields["seconds"]
            self._exchange_s = max(self._exchange_s, fields["update_s"])

    def is_due(self, pending: int, hand_over: Callable[[], None]) -> bool:
        """Say, after a batch, whether this peer has to go now; hand over what is pending first.

        Args:
            pending: Samples that no round has had yet.
            hand_over: Does a round with what there is.
        """
        now = self._clock()
        self._batch_s = max(now - self._batch_began, self._batch_s / 2)
        deadline = self._channel.notice
        if deadline is None:
            return False
        left_s = deadline - now
        if not pending:
            return math.isinf(left_s) or left_s < self._round_s + 2 * self._exchange_s + MARGIN_S
        # what the others compute just now has to end before they come to the round
        needed_s = self._batch_s + 2 * self._exchange_s + MARGIN_S
        if left_s > needed_s + self._batch_s:
            return False
        if left_s > self._exchange_s:
            hand_over()
        return True
