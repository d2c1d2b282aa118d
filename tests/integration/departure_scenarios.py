"""Scenarios between real averagers of which one leaves after its group has formed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hivemind
import psutil

from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from tests.integration.averager_groups import NEVER, PATIENT, averagers, begin, tell

#: Limit of a test [s].
LIMIT = 40.0


class Told(RayhiveGradientAverager):
    """Averager that signals in shared memory that its process knows the members."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.told = multiprocessing.Event()
        super().__init__(*args, **kwargs)

    async def _set_members(self, *args: Any) -> None:
        await super()._set_members(*args)
        self.told.set()


class Late(RayhiveGradientAverager):
    """Averager that joins a group, and takes part in its round when it is allowed to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.joined, self.allowed = multiprocessing.Event(), multiprocessing.Event()
        super().__init__(*args, **kwargs)

    async def run_allreduce(self, *args: Any, **options: Any) -> None:
        self.joined.set()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.allowed.wait, LIMIT)
        await super().run_allreduce(*args, **options)


def departed_member(dhts: Sequence[hivemind.DHT]) -> Any:
    """Let a peer leave the members while others wait for its parts.

    Its averager is killed after that or before, or sends its parts all the same.
    """
    report: dict[str, Any] = {"leaving": str(dhts[2].peer_id)}
    for number, how in enumerate(("killed after", "killed before", "finishes")):
        options = {"prefix": f"departed{number}"}
        with (
            averagers(dhts[2:], Late, **options) as leaving,
            averagers(dhts[:2], Told, **options, **PATIENT) as others,
        ):
            tell([*others, *leaving], [*others, *leaving])
            controls = begin([*others, *leaving], gather=1)
            assert leaving[0].joined.wait(LIMIT)
            if how == "killed before":
                kill(leaving[0])
            for averager in others:
                averager.told.clear()
            tell(others, others)
            assert all(averager.told.wait(LIMIT) for averager in others)
            if how == "killed after":
                kill(leaving[0])
            if how == "finishes":
                leaving[0].allowed.set()
            report[how] = [control.result(LIMIT).summary() for control in controls[:2]]
    return report


def kill(averager: Any) -> None:
    """Kill an averager's process, wait for its end, and remove the socket that it leaves behind."""
    sockets = {c.laddr for c in psutil.Process(averager.pid).net_connections("unix") if c.laddr}
    os.kill(averager.pid, signal.SIGKILL)
    averager.join(NEVER)
    for path in sockets:
        if "hivemind-p2pclient" in path:
            Path(path).unlink()
