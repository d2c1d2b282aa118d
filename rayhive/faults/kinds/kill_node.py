"""Ends whole nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import EndsNodes, nodes_gone
from rayhive.faults.target import Ground


class KillNode(EndsNodes):
    """Ends the raylet of each node and all that runs there, at once and without a word."""

    about: ClassVar[str] = "Ends a node of the testbed with all that runs on it."
    needs: ClassVar[tuple[str, ...]] = ("node",)

    async def inject(self, ground: Ground, who: Sequence[str]) -> dict[str, Any]:
        """End them."""
        self._peers = {node: list(ground.peers_on(node)) for node in who}
        await self.end(ground)
        return {"peers": self._peers}

    async def verify(self, ground: Ground, who: Sequence[str]) -> Proof:
        """See that nobody answers there and that its peers are gone."""
        return await nodes_gone(ground, self._peers)
