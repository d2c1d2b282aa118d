"""Tools of a node agent, one file each, and the tools in use on a node.

The interfaces are in :mod:`rayhive.faults.node_tools`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.cluster.node.tools.cpu_limit import CpuLimitTool
from rayhive.cluster.node.tools.cut import CutTool
from rayhive.cluster.node.tools.flapping import FlappingTool
from rayhive.cluster.node.tools.link_shaping import LinkShapingTool
from rayhive.cluster.node.tools.memory_hog import MemoryHogTool
from rayhive.cluster.node.tools.small_disk import SmallDiskTool
from rayhive.errors import ClusterError
from rayhive.faults import node_tools
from rayhive.faults.node_tools import ArgsT, NodeTool, StateT, Verb
from rayhive.registry import Registry


@dataclass(frozen=True)
class OfferedTool:
    """A tool that agents offer.

    Attributes:
        interface: Its name, and the types of its arguments and its state.
        implementation: The class that carries it out.
    """

    interface: NodeTool[Any, Any]
    implementation: type[Tool[Any, Any]]


#: Every tool that agents offer, by the name of its interface.
NODE_TOOLS: Registry[OfferedTool] = Registry("node tool")


def offer(
    interface: NodeTool[ArgsT, StateT], implementation: Callable[[Site], Tool[ArgsT, StateT]]
) -> None:
    """Register the implementation of an interface.

    The signature has mypy compare the types of arguments and state of the two.
    """
    assert isinstance(implementation, type)
    NODE_TOOLS.register(interface.name)(OfferedTool(interface, implementation))


offer(node_tools.CPU_LIMIT, CpuLimitTool)
offer(node_tools.MEMORY_HOG, MemoryHogTool)
offer(node_tools.SMALL_DISK, SmallDiskTool)
offer(node_tools.LINK_SHAPING, LinkShapingTool)
offer(node_tools.CUT, CutTool)
offer(node_tools.FLAPPING, FlappingTool)

_Key = tuple[str, str, str]


class Toolbox:
    """The started tools of a node.

    A tool stays started until it is stopped, its run is released, or the agent ends.

    Args:
        runs: Runs on the node.
        link: The node's data link.
    """

    def __init__(self, runs: Runs, link: NodeLink) -> None:
        self._runs, self._link = runs, link
        self._started: dict[_Key, Tool[Any, Any]] = {}

    def in_use(self) -> list[_Key]:
        """Return run, tool name and subject of every started tool."""
        return sorted(self._started)

    async def use(
        self,
        run_id: str,
        name: str,
        subject: str,
        verb: Verb,
        args: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Call one operation of a tool.

        Args:
            run_id: Run on whose behalf.
            name: Registered name of the tool.
            subject: Object that the tool acts on.
            verb: The operation.
            args: Arguments of ``start``, as JSON.

        Returns:
            The state as JSON; ``stop`` may return None.

        Raises:
            ClusterError: The run is not on this node, or the tool refuses.
        """
        if run_id not in self._runs:
            raise ClusterError(f"{run_id} is not on this node")
        offered, key = NODE_TOOLS.get(name), (run_id, name, subject)
        tool = self._started.get(key)
        if tool is None and verb == "stop":
            return None
        if tool is None:
            tool = offered.implementation(Site(self._runs, run_id, subject, self._link))
        if verb == "start":
            state = await self._start(key, tool, offered.interface.args.model_validate(args))
        elif verb == "state":
            state = await tool.state()
        else:
            state = await self._stop(key, tool)
        return None if state is None else dict(state.model_dump(mode="json", by_alias=True))

    async def _start(self, key: _Key, tool: Tool[Any, Any], args: Any) -> Any:
        again = key in self._started
        self._started[key] = tool
        try:
            state = await tool.start(args)
        except BaseException:
            if not again and self._started.get(key) is tool:
                del self._started[key]
            raise
        if self._started.get(key) is not tool:
            await self._undo(tool)
            raise ClusterError(f"{key[0]} was cleared while {key[1]} was started")
        return state

    async def _stop(self, key: _Key, tool: Tool[Any, Any]) -> Any:
        try:
            state = await tool.stop()
        except OSError as error:
            raise ClusterError(f"{key[1]} can't be undone: {error}") from error
        self._started.pop(key, None)
        return state

    async def release(self, run_id: str) -> None:
        """Stop all tools of a run, before its folder is removed."""
        for key in [key for key in self._started if key[0] == run_id]:
            await self._undo(self._started.pop(key))

    @staticmethod
    async def _undo(tool: Tool[Any, Any]) -> None:
        with contextlib.suppress(OSError, ClusterError):
            await tool.stop()

    async def recover(self) -> None:
        """Undo effects that dead agents, or this one, left on the node; without runs only.

        Agents of other studies may have runs on the node: what they do stays.
        """
        for _, offered in NODE_TOOLS.items():
            with contextlib.suppress(OSError):
                await offered.implementation.recover(self._link)
