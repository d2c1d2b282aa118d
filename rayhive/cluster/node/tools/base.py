"""Contract of a node tool: start, state, stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.cluster.node.runs import Runs, tag
from rayhive.faults.node_tools import ArgsT, StateT


@dataclass(frozen=True)
class Site:
    """Place of a tool on the node.

    Attributes:
        runs: Runs on the node.
        run_id: Run on whose behalf the tool is used; its end stops the tool.
        subject: Object that the tool acts on; see :meth:`rayhive.faults.node_tools.NodeTool.on`.
        link: The node's data link.
    """

    runs: Runs
    run_id: str
    subject: str
    link: NodeLink

    @property
    def name(self) -> str:
        """Name of kernel objects of the tool: subjects of two runs may be the same."""
        return f"{tag(self.run_id)}-{self.subject}"

    def peer(self) -> OwnedProcesses:
        """Return the processes of the peer whose leader is the subject.

        Raises:
            ClusterError: The run has no such peer on this node.
        """
        return self.runs.peer(self.run_id, int(self.subject))


class Tool(ABC, Generic[ArgsT, StateT]):
    """One tool for one subject. Its effect lasts until it is stopped.

    Args:
        site: Place of the tool on the node.
    """

    def __init__(self, site: Site) -> None:
        self.site = site

    @abstractmethod
    async def start(self, args: ArgsT) -> StateT:
        """Apply the tool and return its state. A started tool takes the arguments, or refuses.

        Raises:
            ClusterError: The machine or the tool refuses.
        """

    @abstractmethod
    async def state(self) -> StateT:
        """Return the state.

        Raises:
            ClusterError: The tool was not started and has no state before that.
        """

    @abstractmethod
    async def stop(self) -> StateT | None:
        """Undo the effect. Called after ``start`` only; a second call does nothing.

        Returns:
            The last state, for a tool whose end has a result.

        Raises:
            OSError: The kernel refuses to undo the effect.
        """

    @classmethod
    async def recover(cls, link: NodeLink) -> None:
        """Undo effects that outlived the agent that caused them; called without any runs.

        Agents of other studies may be active on the node.
        """
        return
