"""Fills the disk that a peer writes its checkpoints to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import Listening, leader_of, require_living, undo
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

#: The folder in a peer's temporary directory where its checkpoints go.
FOLDER = "checkpoints"
_MB = 10**6
#: How long a peer may take to write a checkpoint between two batches, and to finish a round [s].
_CHECKPOINT_S = 15.0
_ROUND_S = 30.0


class Args(Model):
    """Parameters of :class:`DiskFull`.

    Attributes:
        megabytes: Size of the file system that is mounted there and filled [MB].
    """

    megabytes: int = Field(default=16, ge=1, le=256)


class DiskFull(FaultKind):
    """A small file system in memory, mounted over the checkpoint folder of each peer, is filled.

    A real disk is never filled: nothing is written unless the folder shows the file system that
    this fault mounted. The proof has each peer write a checkpoint: that has to fail with ENOSPC,
    and the peer has to finish another round.
    """

    about: ClassVar[str] = "Fills the small file system that a peer's checkpoints go to."
    group: ClassVar[Group] = "node"
    needs: ClassVar[tuple[str, ...]] = ("mount",)
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = Args

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._mounted: dict[str, tuple[str, int]] = {}

    async def setup(self, swarm: FaultTarget) -> None:
        """Mount it, for peers that are known before training starts."""
        living = set(swarm.living())
        for peer in self.planned.who:
            if peer in living:
                await self._mount(swarm, peer)

    async def _mount(self, swarm: FaultTarget, peer: str) -> None:
        node, leader = swarm.node_of(peer), await leader_of(swarm, peer)
        if self._mounted.get(peer) != (node, leader):  # another life has another folder
            await swarm.agent(node, "mount_disk", leader, FOLDER, self.args.megabytes * _MB)
            self._mounted[peer] = (node, leader)

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Fill it."""
        require_living(swarm, who)
        written = {}
        for peer in who:
            await self._mount(swarm, peer)
            node, leader = self._mounted[peer]
            written[peer] = await swarm.agent(node, "fill_disk", leader)
        return {"written": written}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that nothing can be written there, that the peer says so, and that it goes on."""
        seen = await asyncio.gather(*(self._look(swarm, peer) for peer in who))
        ok = all(
            each["disk"]["error"] == "ENOSPC" and each["checkpoint"] == "ENOSPC" and each["goes_on"]
            for each in seen
        )
        return Proof(ok, dict(zip(who, seen, strict=True)))

    async def _look(self, swarm: FaultTarget, peer: str) -> dict[str, Any]:
        node, leader = self._mounted[peer]
        disk = await swarm.agent(node, "disk_state", leader)
        checkpoints = Listening(swarm, "checkpoint", [peer])
        await swarm.command(peer, "checkpoint")
        event = await checkpoints.heard(peer, _CHECKPOINT_S)
        if event is None:
            return {"disk": disk, "checkpoint": None, "goes_on": False}
        went_on = await swarm.event("transition", peer, _ROUND_S)
        return {"disk": disk, "checkpoint": event.get("error"), "goes_on": went_on is not None}

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Make room again; the file system stays until the end."""
        failed = {}
        for peer, (node, leader) in self._mounted.items():
            error = await undo(swarm, node, "empty_disk", leader)
            if error is not None:
                failed[peer] = error
        return {"failed": failed}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Unmount it."""
        mounted, self._mounted = self._mounted, {}
        for node, leader in mounted.values():
            await undo(swarm, node, "unmount_disk", leader)
