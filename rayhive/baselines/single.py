"""Baseline ``single``: one device trains alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayhive.baselines.base import Baseline, Member, batches_per_round
from rayhive.spec.replicate import PeerSpec


class Alone(Member):
    """The one member; it accumulates the whole round."""

    def __init__(self, spec: PeerSpec, batch_size: int) -> None:
        super().__init__(spec, batch_size)
        self.batches_per_round = batches_per_round(spec.swarm.target_batch_size, batch_size, 1)
        self.round_size = self.batches_per_round * batch_size

    def listen(self, known: Sequence[str]) -> list[str]:
        """Return an address that nobody uses."""
        return [f"tcp://{self.spec.host}:0"]

    def strategy(self) -> str:
        """Return Lightning's strategy for one device."""
        return "auto"

    def round_fields(self) -> dict[str, Any]:
        """Return that nothing was sent."""
        return {"outcome": "alone", "group_size": 1, "sent_bytes": 0, "received_bytes": 0}


class Single(Baseline):
    """The whole round on one device: the node with most GPUs, then the largest share of cores.

    The other peers of the study hold their nodes and do nothing, so that the scenarios' faults hit
    the same nodes.
    """

    about = "One device trains alone, on the best node of the swarm."
    member = Alone

    def trains(self, spec: PeerSpec) -> bool:
        """Return whether this is the peer on the best node."""
        return not spec.joins and spec.peer == best_peer(spec)

    def share(self, spec: PeerSpec) -> tuple[int, int]:
        """Return all of the data."""
        return 0, 1


def best_peer(spec: PeerSpec) -> int:
    """Return the number of the first peer on the best node class."""
    classes = [node_class for _, node_class in spec.swarm.peer_classes]
    if not classes:
        return 0
    return max(range(len(classes)), key=lambda n: (classes[n].gpus, classes[n].cpu_share, -n))
