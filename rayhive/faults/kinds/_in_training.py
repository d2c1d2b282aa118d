"""What the kinds have in common that a peer commits itself, from its spec."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from rayhive.errors import RayhiveError
from rayhive.events import Event
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model

#: Longest wait for a peer's report once the fault is due [s]; it has its round to end first.
REPORT_S = 60.0
#: Longer than any replicate [s].
_EVER = 10 * 365 * 24 * 3600.0


class RoundsArgs(Model):
    """Parameters of a fault in gradients.

    Attributes:
        rounds: In how many rounds, from the planned one on.
    """

    rounds: int = Field(default=1, ge=1)


class InTraining(FaultKind):
    """A fault that a peer commits itself: injected by waiting for the peer's report."""

    group: ClassVar[Group] = "training"
    needs: ClassVar[tuple[str, ...]] = ()
    inside: ClassVar[bool] = True

    _reports: dict[str, asyncio.Task[Event | None]]
    _last: dict[str, asyncio.Task[Event | None]]
    _seen: list[Event]

    @property
    def patience_s(self) -> float:
        """The proof waits for the last of its rounds."""
        return _EVER

    async def setup(self, swarm: FaultTarget) -> None:
        """Listen from the start: events of the past do not count."""

        def reports(count: int) -> dict[str, asyncio.Task[Event | None]]:
            fault = self.planned.id
            return {
                peer: asyncio.ensure_future(
                    swarm.event("sabotaged", peer, _EVER, count=count, fault=fault)
                )
                for peer in self.planned.who
            }

        self._reports, self._last = reports(1), reports(self.args.rounds)
        await asyncio.sleep(0)  # they listen from here on

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Wait until every peer has reported.

        Raises:
            RayhiveError: One did not, in time.
        """
        _, late = await asyncio.wait(self._reports.values(), timeout=REPORT_S)
        silent = [peer for peer, report in self._reports.items() if report in late]
        if silent:
            raise RayhiveError(f"no report in {REPORT_S:.0f} s of {', '.join(silent)}")
        events = [report.result() for report in self._reports.values()]
        self._seen = [event for event in events if event is not None]
        return {"sabotaged": [{"round": e["round"], **e["what"]} for e in self._seen]}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Hold what the peers measured, in the first and last round, against what was asked."""
        last = [event for event in await asyncio.gather(*self._last.values()) if event is not None]
        whats = [event["what"] for event in last]
        both = [*(event["what"] for event in self._seen), *whats]
        ok = len(both) == 2 * len(self.planned.who) and all(map(self.took_effect, both))
        return Proof(ok, {"sabotaged": whats, "rounds": self.args.rounds})

    @abstractmethod
    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether what a peer has measured is the fault."""

    async def teardown(self, swarm: FaultTarget) -> None:
        """Listen no longer."""
        waiting = [getattr(self, name, {}) for name in ("_reports", "_last")]
        for report in [task for tasks in waiting for task in tasks.values()]:
            report.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await report
