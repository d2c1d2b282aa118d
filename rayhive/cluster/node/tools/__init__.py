"""Tools of a node agent, one file each; the interfaces are :mod:`rayhive.faults.node_tools`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.cluster.node.tools.cpu_limit import CpuLimitTool
from rayhive.cluster.node.tools.cut import CutTool
from rayhive.cluster.node.tools.flapping import FlappingTool
from rayhive.cluster.node.tools.link_shaping import LinkShapingTool
from rayhive.cluster.node.tools.memory_hog import MemoryHogTool
from rayhive.cluster.node.tools.small_disk import SmallDiskTool
from rayhive.faults.node_tools import (
    CPU_LIMIT,
    CUT,
    FLAPPING,
    LINK_SHAPING,
    MEMORY_HOG,
    SMALL_DISK,
    ArgsT,
    NodeTool,
    StateT,
)
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


offer(CPU_LIMIT, CpuLimitTool)
offer(MEMORY_HOG, MemoryHogTool)
offer(SMALL_DISK, SmallDiskTool)
offer(LINK_SHAPING, LinkShapingTool)
offer(CUT, CutTool)
offer(FLAPPING, FlappingTool)
