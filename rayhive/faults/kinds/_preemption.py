"""What preempted peers and peers on drained nodes go through."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any

from rayhive.faults.kinds._process import SETTLE_S, Listening, States, all_are, wait_for_states
from rayhive.faults.target import FaultTarget


class Notice:
    """Announces the end to peers and brings it about.

    Args:
        swarm: The swarm.
        who: The slots.
        notice_s: Time between the notice and SIGTERM [s].
        grace_s: Time between SIGTERM and SIGKILL [s].
    """

    def __init__(
        self, swarm: FaultTarget, who: Sequence[str], notice_s: float, grace_s: float
    ) -> None:
        self._swarm, self._who = swarm, list(who)
        self._notice_s, self._grace_s = notice_s, grace_s
        self._noticed = Listening(swarm, "notice", who)
        self._left = Listening(swarm, "left", who)
        self._pids: dict[str, list[int]] = {}

    async def give(self) -> None:
        """Tell every peer; their end is expected from now on."""
        for peer in self._who:
            self._swarm.expect_loss(peer)
        states = await asyncio.gather(*(self._swarm.process_states(p) for p in self._who))
        for peer, seen in zip(self._who, states, strict=True):
            self._pids[peer] = [pid for pid, state in seen.items() if state != "gone"]
        self._began = time.monotonic()
        if self._notice_s > 0:
            await asyncio.gather(
                *(
                    self._swarm.command(peer, "notice", deadline_s=self._notice_s)
                    for peer in self._who
                )
            )

    async def end(self, peer: str) -> dict[str, Any]:
        """Wait until one peer is gone, by force from the deadline on.

        Returns:
            ``noticed`` (whether it said that it knows; None without notice), ``left`` (what it
            handed over, None if it did not say goodbye), ``by`` (``itself``, ``SIGTERM``,
            ``SIGKILL``), ``gone`` and ``seconds`` (since the notice).
        """
        noticed, left = None, None
        if self._notice_s > 0:
            noticed = await self._noticed.heard(peer, self._remaining()) is not None
            event = await self._left.heard(peer, self._remaining())
            if event is not None:
                left = {key: event.get(key) for key in ("round", "handed_over", "lost")}
        by = "itself"
        states = await self._gone_within(peer, self._remaining())
        for number, patience in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, SETTLE_S)):
            if self._is_gone(peer, states):
                break
            by = number.name
            await self._swarm.signal(peer, number)
            states = await self._gone_within(peer, patience)
        return {
            "noticed": noticed,
            "left": left,
            "by": by,
            "gone": self._is_gone(peer, states),
            "seconds": round(time.monotonic() - self._began, 3),
        }

    async def deadline(self) -> None:
        """Return when the time is over, which it may be already."""
        await asyncio.sleep(self._remaining())

    def _remaining(self) -> float:
        return max(0.0, self._began + self._notice_s - time.monotonic())

    def _is_gone(self, peer: str, states: States) -> bool:
        return all_are("gone", self._pids[peer])(states)

    async def _gone_within(self, peer: str, timeout: float) -> States:
        return await wait_for_states(
            self._swarm, peer, lambda states: self._is_gone(peer, states), timeout
        )
