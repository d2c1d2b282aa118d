"""Notice and end of preempted peers and of peers on drained nodes."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any

from rayhive.faults.kinds._process import SETTLE_S, Listening, States, all_are, wait_for_states
from rayhive.faults.target import FaultTarget


class Notice:
    """Notice to peers of their end, and signals to peers that outlive the deadline.

    Args:
        swarm: The swarm.
        peers: The replicas.
        notice_s: Time between the notice and SIGTERM [s].
        grace_s: Time between SIGTERM and SIGKILL [s].
    """

    def __init__(
        self, swarm: FaultTarget, peers: Sequence[str], notice_s: float, grace_s: float
    ) -> None:
        self._swarm, self._peers = swarm, list(peers)
        self._notice_s, self._grace_s = notice_s, grace_s
        self._noticed = Listening(swarm, "notice", peers)
        self._left = Listening(swarm, "left", peers)
        self._pids: dict[str, list[int]] = {}

    async def give(self) -> None:
        """Send the notice to every peer; their end is expected from now on."""
        for peer in self._peers:
            self._swarm.expect_loss(peer)
        states = await asyncio.gather(*(self._swarm.process_states(p) for p in self._peers))
        for peer, seen in zip(self._peers, states, strict=True):
            self._pids[peer] = [pid for pid, state in seen.items() if state != "gone"]
        self._began = time.monotonic()
        if self._notice_s > 0:
            await asyncio.gather(
                *(
                    self._swarm.command(peer, "notice", deadline_s=self._notice_s)
                    for peer in self._peers
                )
            )

    async def end(self, peer: str) -> dict[str, Any]:
        """Wait until one peer is gone; from the deadline on, send signals.

        Returns:
            ``noticed`` (whether it confirmed the notice; None without notice), ``left`` (fields of
            its ``left`` event, None if it sent none), ``by`` (``itself``, ``SIGTERM`` or
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

    async def wait_for_deadline(self) -> None:
        """Wait for the deadline."""
        await asyncio.sleep(self._remaining())

    def _remaining(self) -> float:
        return max(0.0, self._began + self._notice_s - time.monotonic())

    def _is_gone(self, peer: str, states: States) -> bool:
        return all_are("gone", self._pids[peer])(states)

    async def _gone_within(self, peer: str, timeout: float) -> States:
        return await wait_for_states(
            self._swarm, peer, lambda states: self._is_gone(peer, states), timeout
        )
