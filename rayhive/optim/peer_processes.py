"""Processes of one peer: its trainer, DHT, network daemon and averagers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping

import hivemind
from hivemind.averaging import DecentralizedAverager

from rayhive.optim.child_processes import descendants
from rayhive.optim.watchdog import PeerProcessDied, ProcessWatchdog

#: Longest wait for the end of a process that was killed [s].
JOIN_S = 1.0
#: Names of the processes in error texts, by role.
SPOKEN = {
    "dht": "DHT",
    "gradient_averager": "gradient averager's process",
    "state_averager": "state averager's process",
}


class PeerProcesses:
    """The processes that a peer cannot do without.

    Args:
        dht: The peer's DHT.
        averagers: Role -> running averager.
    """

    def __init__(self, dht: hivemind.DHT, averagers: Mapping[str, DecentralizedAverager]) -> None:
        self._dht, self._averagers = dht, dict(averagers)

    @property
    def pids(self) -> dict[str, int]:
        """Role -> pid."""
        return {
            "trainer": os.getpid(),
            "dht": self._dht.pid,
            **{child.name(): child.pid for child in descendants(self._dht.pid)},
            **{role: averager.pid for role, averager in self._averagers.items()},
        }

    def watch(self, on_death: Callable[[PeerProcessDied], None]) -> ProcessWatchdog:
        """Return a watchdog of all processes but the trainer."""
        watched = {role: pid for role, pid in self.pids.items() if role != "trainer"}
        named = {SPOKEN.get(role, role): pid for role, pid in watched.items()}
        return ProcessWatchdog(named, on_death)

    def kill_averagers(self) -> None:
        """Kill the averagers, and release the tensors' locks that they may have held."""
        for averager in self._averagers.values():
            averager.kill()
            averager.join(JOIN_S)
            with contextlib.suppress(ValueError):  # it was not held
                averager.lock_averaged_tensors.release()
