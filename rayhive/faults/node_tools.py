"""Typed interfaces of the tools that a node agent offers to fault kinds.

A tool changes something on its node. :meth:`ToolHandle.start` applies it, :meth:`ToolHandle.state`
reads it back from the kernel, :meth:`ToolHandle.stop` undoes it. This module declares the name,
the arguments and the state of each tool; the implementations are in
:mod:`rayhive.cluster.node.tools`, one file each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from pydantic import Field

from rayhive.spec import Link, Model

ArgsT = TypeVar("ArgsT", bound=Model)
StateT = TypeVar("StateT", bound=Model)
Verb = Literal["start", "state", "stop"]


@dataclass(frozen=True)
class NodeTool(Generic[ArgsT, StateT]):
    """Interface of a tool.

    Attributes:
        name: Its registered name.
        args: Type of the arguments of ``start``.
        state: Type that all three operations return.
    """

    name: str
    args: type[ArgsT]
    state: type[StateT]

    def on(self, target: ToolTarget, node: str, subject: str) -> ToolHandle[ArgsT, StateT]:
        """Return a handle to the tool on one node.

        Args:
            target: The swarm.
            node: Logical node (``node-0``).
            subject: The object that the tool acts on, which also tells its instances apart: the
                pid of a peer's leader process, the id of the fault, or the node.
        """
        return ToolHandle(target, self, node, subject)


class ToolTarget(Protocol):
    """The part of a fault target that reaches the tools of node agents."""

    async def use_tool(
        self,
        node: str,
        tool: NodeTool[ArgsT, StateT],
        subject: str,
        verb: Verb,
        args: ArgsT | None = None,
    ) -> StateT | None:
        """Call one operation of a tool on a logical node.

        Args:
            node: Logical node (``node-0``).
            tool: The tool's interface.
            subject: The object that the tool acts on.
            verb: The operation.
            args: Arguments of ``start``; None for the other two.

        Returns:
            The state afterwards; ``stop`` may return None.

        Raises:
            ClusterError: The agent does not answer, or the tool refuses.
        """


@dataclass(frozen=True)
class ToolHandle(Generic[ArgsT, StateT]):
    """A tool on one node, for one subject.

    Attributes:
        target: The swarm.
        tool: The tool's interface.
        node: Logical node.
        subject: The object that the tool acts on.
    """

    target: ToolTarget
    tool: NodeTool[ArgsT, StateT]
    node: str
    subject: str

    async def start(self, args: ArgsT) -> StateT:
        """Apply the tool and return its state.

        A started tool takes the new arguments, or refuses.

        Raises:
            ClusterError: The agent does not answer, or the tool refuses.
        """
        return await self._present("start", args)

    async def state(self) -> StateT:
        """Return the state, also before ``start`` where the tool has one then.

        Raises:
            ClusterError: The agent does not answer, or the tool has no state.
        """
        return await self._present("state")

    async def stop(self) -> StateT | None:
        """Undo the tool's effect; does nothing if the tool was not started.

        Returns:
            The last state, for a tool whose end has a result.

        Raises:
            ClusterError: The agent does not answer, or the effect cannot be undone.
        """
        return await self.target.use_tool(self.node, self.tool, self.subject, "stop")

    async def _present(self, verb: Verb, args: ArgsT | None = None) -> StateT:
        state = await self.target.use_tool(self.node, self.tool, self.subject, verb, args)
        assert state is not None, "only stop may return no state"
        return state


class CpuQuota(Model):
    """Arguments of :data:`CPU_LIMIT`, and parameters of the fault ``straggler``.

    Attributes:
        cores: CPU time that all processes of the peer get together [s/s].
    """

    cores: float = Field(default=0.2, ge=0.02)


class CpuUsage(Model):
    """State of :data:`CPU_LIMIT`.

    Attributes:
        pids: Processes in the control group.
        periods: Scheduling periods since the group was made.
        throttled: Periods in which the quota was used up.
        throttled_s: Time for which processes were held back [s].
    """

    pids: tuple[int, ...] = ()
    periods: int
    throttled: int
    throttled_s: float


class MemorySize(Model):
    """Arguments of :data:`MEMORY_HOG`.

    Attributes:
        size: Memory to hold [bytes].
    """

    size: int = Field(ge=1)


class HeldMemory(Model):
    """State of :data:`MEMORY_HOG`.

    Attributes:
        pid: Process that holds the memory; None before ``start``.
        rss: Held memory that is resident [bytes].
        free: Memory that could still be held, besides the node's reserve [bytes].
    """

    pid: int | None = None
    rss: int = 0
    free: int


class DiskArgs(Model):
    """Arguments of :data:`SMALL_DISK`.

    Attributes:
        folder: Name of a folder in the peer's temporary directory to mount over.
        size: Size of the file system [bytes].
        full: Whether it is filled. ``start`` with another value fills or empties it.
    """

    folder: str
    size: int
    full: bool = False


class DiskState(Model):
    """State of :data:`SMALL_DISK`.

    Attributes:
        written: Bytes that this call of ``start`` wrote to fill the file system.
        free: Free space [bytes].
        error: Name of the error that a write fails with (``ENOSPC``); None if it succeeds.
    """

    written: int = 0
    free: int
    error: str | None


class LinkChange(Model):
    """Arguments of :data:`LINK_SHAPING`; a quantity that is None keeps its value.

    Attributes:
        rate_mbit: Rate in each direction [Mbit/s].
        delay_ms: Delay in each direction [ms].
        loss: Share of the packets that is lost in each direction.
    """

    rate_mbit: float | None = None
    delay_ms: float | None = None
    loss: float | None = None


class LinkMeasurement(Model):
    """Measurement of a node's link against the switch; None where it was not measured.

    Attributes:
        rate_up_mbit: Rate from the node, headers included [Mbit/s].
        rate_down_mbit: Rate to the node [Mbit/s].
        rtt_ms: Round-trip time, the sum of the medians of both directions [ms].
        jitter_ms: Difference between ``rtt_ms`` and the same sum of the minima [ms].
        loss_up: Share of the packets from the node that was lost.
        loss_down: Share of the packets to the node that was lost.
        probes: Packets in each direction that the loss was counted on.
    """

    rate_up_mbit: float | None = None
    rate_down_mbit: float | None = None
    rtt_ms: float | None = None
    jitter_ms: float | None = None
    loss_up: float | None = None
    loss_down: float | None = None
    probes: int = 0


class LinkState(Model):
    """State of :data:`LINK_SHAPING`.

    Attributes:
        now: Present setting of the link.
        before: Setting before ``start``; None before it.
        measured: Measurement of the changed quantities, by ``state`` after ``start``.
    """

    now: Link
    before: Link | None = None
    measured: LinkMeasurement | None = None


class CutArgs(Model):
    """Arguments of :data:`CUT`.

    Attributes:
        keep: Data addresses that stay reachable in both directions.
        direction: ``out`` cuts packets from the node, ``in`` packets to it, ``both`` all.
    """

    keep: tuple[str, ...] = ()
    direction: Literal["out", "in", "both"] = "both"


class Arrived(Model):
    """Probe packets between two nodes.

    Attributes:
        sent: Packets sent in each direction.
        out: Packets that arrived at the other node.
        back: Packets that arrived from the other node.
    """

    sent: int
    out: int
    back: int = Field(alias="in")


class CutState(Model):
    """State of :data:`CUT`.

    Attributes:
        address: The node's own data address.
        cut_from: Data addresses that the node is cut from.
        arrived: Result of a probe of each cut and each kept address, by ``state`` after ``start``.
        dropped: Packets that the cut dropped, by ``stop``.
    """

    address: str
    cut_from: tuple[str, ...] = ()
    arrived: dict[str, Arrived] = Field(default_factory=dict)
    dropped: int = 0


class FlapArgs(Model):
    """Arguments of :data:`FLAPPING`, and parameters of the fault ``flapping``.

    Attributes:
        down_s: Duration of each cut [s].
        up_s: Time between two cuts [s].
        times: Number of cuts; None cuts until the fault is healed.
    """

    down_s: float = Field(default=2.0, ge=0.1)
    up_s: float = Field(default=5.0, ge=0.1)
    times: int | None = Field(default=None, ge=1)


class FlapPhase(Model):
    """One phase of a flapping link, with the results of probes of all other nodes together.

    Attributes:
        phase: ``down`` or ``up``.
        at: Begin of the phase [s, Unix time].
        sent: Packets sent in each direction; None if there is no other node.
        out: Packets that arrived at the other nodes.
        back: Packets that arrived from them.
    """

    phase: Literal["down", "up"]
    at: float
    sent: int | None = None
    out: int | None = None
    back: int | None = Field(default=None, alias="in")


class FlapState(Model):
    """State of :data:`FLAPPING`.

    Attributes:
        phases: Phases so far that were probed.
    """

    phases: tuple[FlapPhase, ...] = ()


#: Quota of CPU time on all processes of a peer; the subject is the pid of the peer's leader.
CPU_LIMIT = NodeTool("cpu_limit", CpuQuota, CpuUsage)
#: Process that holds memory on a node; the subject is the node.
MEMORY_HOG = NodeTool("memory_hog", MemorySize, HeldMemory)
#: Small file system over a folder of a peer; the subject is the pid of the peer's leader.
SMALL_DISK = NodeTool("small_disk", DiskArgs, DiskState)
#: Rate, delay and loss of a node's data link; the subject is the fault.
LINK_SHAPING = NodeTool("link_shaping", LinkChange, LinkState)
#: Cut between a node and others on the data plane; the subject is the fault.
CUT = NodeTool("cut", CutArgs, CutState)
#: Data link that is cut again and again; the subject is the fault.
FLAPPING = NodeTool("flapping", FlapArgs, FlapState)
