"""Takes peers away as a provider takes spot instances: a notice, a deadline, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rayhive.errors import RayhiveError
from rayhive.faults.kind import Proof
from rayhive.faults.kinds._preemption import Notice
from rayhive.faults.kinds._process import EndsPeers, ReplacedArgs, require_living
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model


class Args(ReplacedArgs):
    """Parameters of :class:`Preempt`.

    Attributes:
        notice_s: Time between the notice and SIGTERM [s]; with 0 there is no notice.
        grace_s: Time between SIGTERM and SIGKILL [s].
        drain: Announce to Ray, too, that their nodes will be gone at the deadline, so that it
            starts nothing there any more; replacements then go elsewhere.
    """

    notice_s: float = Field(default=15.0, ge=0)
    grace_s: float = Field(default=2.0, ge=0)
    drain: bool = False

    @model_validator(mode="after")
    def _elsewhere(self) -> Args:
        if self.drain and self.where == "same":
            raise ValueError("drain needs where: other, as Ray starts nothing on a drained node")
        return self


class Preempt(EndsPeers):
    """A notice to each peer; SIGTERM at the deadline, SIGKILL after that.

    The injection is the notice: it returns when every peer has been told. The proof waits for
    the end of the peers, which comes at the deadline plus ``grace_s`` at the latest.
    """

    about: ClassVar[str] = "Tells a peer that it will be taken away, and does it at the deadline."
    Args: ClassVar[type[Model]] = Args

    @property
    def patience_s(self) -> float:
        """The proof waits for the end."""
        return float(60.0 + self.args.notice_s)

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Give the notice."""
        require_living(swarm, who)
        self._notice = Notice(swarm, who, self.args.notice_s, self.args.grace_s)
        await self._notice.give()
        return {"notice_s": self.args.notice_s, "drained": await self._drain(swarm, who)}

    async def _drain(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, str | None]:
        """Return for each node that was drained None, or why the cluster refused."""
        drained: dict[str, str | None] = {}
        for node in {swarm.node_of(peer): None for peer in who} if self.args.drain else ():
            try:
                await swarm.drain(node, self.args.notice_s)
                drained[node] = None
            except RayhiveError as error:
                drained[node] = str(error)
        return drained

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Wait for the end of each, by itself or by force, and see that nothing is left."""
        seen = await asyncio.gather(*(self._notice.end(peer) for peer in who))
        what = dict(zip(who, seen, strict=True))
        return Proof(all(each["gone"] and each["noticed"] is not False for each in seen), what)
