"""Fault ``disk_full``: the disk that a peer writes its checkpoints to is full."""

from __future__ import annotations

from pydantic import Field

from rayhive.events import Checkpoint, Transition
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import SMALL_DISK, DiskArgs, DiskState, ToolHandle
from rayhive.faults.steps import Listening, failures, for_each, leader_of, require_living
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.commands import WriteCheckpoint

#: Folder in a peer's temporary directory that its checkpoints are written to.
FOLDER = "checkpoints"
_MB = 10**6
#: Time limits for a peer to write a checkpoint between two batches, and to finish a round [s].
CHECKPOINT_S = 15.0
ROUND_S = 30.0


class DiskFullArgs(Model):
    """Parameters of :class:`DiskFull`.

    Attributes:
        megabytes: Size of the file system that is mounted and filled [MB].
    """

    megabytes: int = Field(default=16, ge=1, le=256)


class DiskFull(FaultKind):
    """Fills a small file system in memory that is mounted over each peer's checkpoint folder.

    A real disk is never filled: the tool writes only to the file system that it mounted. For the
    proof each peer writes a checkpoint, which has to fail with ENOSPC, and finishes another round.
    """

    of_swarm = True
    about = "Fills the small file system that a peer's checkpoints go to."
    group = "node"
    needs = ("mount",)
    heals = True
    args: DiskFullArgs
    tools: dict[str, ToolHandle[DiskArgs, DiskState]]

    def _disk(self, full: bool) -> DiskArgs:
        return DiskArgs(folder=FOLDER, size=self.args.megabytes * _MB, full=full)

    async def setup(self, swarm: FaultTarget) -> None:
        """Mount the file system for peers that are known before training starts."""
        living = set(swarm.living())
        for peer in self.planned.who:
            if peer in living:
                await self._start(swarm, peer, full=False)

    async def _start(self, swarm: FaultTarget, peer: str, full: bool) -> DiskState:
        """Mount the file system over the folder of the peer's present incarnation, if need be."""
        disk = SMALL_DISK.on(swarm, swarm.node_of(peer), await leader_of(swarm, peer))
        self.tools[peer] = disk
        return await disk.start(self._disk(full))

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Fill the file system."""
        require_living(swarm, targets)
        filled = {peer: await self._start(swarm, peer, full=True) for peer in targets}
        return {"written": {peer: state.written for peer, state in filled.items()}}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that a write fails, that the peer reports it, and that it trains on."""
        seen = await for_each(targets, lambda peer: self._check(swarm, peer))
        ok = all(
            each["disk"]["error"] == "ENOSPC" and each["checkpoint"] == "ENOSPC" and each["goes_on"]
            for each in seen.values()
        )
        return Proof(ok, seen)

    async def _check(self, swarm: FaultTarget, peer: str) -> Record:
        state = await self.tools[peer].state()
        disk = {"free": state.free, "error": state.error}
        checkpoints = Listening(swarm, Checkpoint, [peer])
        await swarm.command(peer, WriteCheckpoint())
        event = await checkpoints.heard(peer, CHECKPOINT_S)
        if event is None:
            return {"disk": disk, "checkpoint": None, "goes_on": False}
        went_on = await swarm.event(Transition, peer, ROUND_S)
        return {"disk": disk, "checkpoint": event.error, "goes_on": went_on is not None}

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Free the space; the teardown unmounts the file system."""
        empty = self._disk(full=False)
        return {"failed": await failures(self.tools, lambda disk: disk.start(empty))}
