"""Attribution of a failed replicate to its configuration or to the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rayhive.cluster.replicate.peer_table import Outcome, PeerTable


async def blame(
    trouble: str,
    peer_table: PeerTable,
    silent_nodes: Callable[[Sequence[str]], Awaitable[dict[str, str]]],
) -> Outcome:
    """Return the outcome of a replicate that failed.

    It is ``lost`` if an actor or a node is the cause, and otherwise ``failed``: a failure of the
    configuration. A node that goes down takes its peers along before Ray notices, so all nodes are
    asked.

    Args:
        trouble: Description of the failure.
        peer_table: State of the peers.
        silent_nodes: Returns the nodes of some peers that do not answer, each with the reason.
    """
    if peer_table.any_actor_lost():
        return Outcome("lost", trouble)
    gone = await silent_nodes(peer_table.expected_to_live())
    if not gone:
        return Outcome("failed", trouble)
    nodes = "; ".join(f"node {node[:8]} does not answer ({why})" for node, why in gone.items())
    return Outcome("lost", f"{nodes}; {trouble}")
