"""Notice source ``ray``: a drain of this node, requested of Ray by an operator or an autoscaler."""

from __future__ import annotations

import asyncio
import time

import ray

from rayhive.cluster.node import raylets
from rayhive.cluster.node.notices.base import NodeNotice, NoticeSource, SourceError
from rayhive.errors import ClusterError


class Ray(NoticeSource):
    """Ray's list of draining nodes. KubeRay, Anyscale and ``ray drain-node`` add nodes to it."""

    about = "Ray: drain of the node"
    every_s = 2.0

    @classmethod
    def likely(cls) -> bool:
        """Return whether this process is on a Ray cluster."""
        return ray.is_initialized()

    async def identify(self) -> str:
        """Return Ray's id of the node."""
        if not ray.is_initialized():
            raise SourceError("this process is on no Ray cluster")
        return str(ray.get_runtime_context().get_node_id())

    async def check(self) -> list[NodeNotice]:
        """Return the drain of this node, if it is draining."""
        node = await self.identify()
        try:
            draining = await asyncio.to_thread(raylets.draining)
        except ClusterError as error:
            raise SourceError(str(error)) from error
        if node not in draining:
            return []
        deadline = draining[node]
        left = None if deadline is None else max(0.0, deadline - time.time())
        return [NodeNotice("ray", "node drain", left)]
