"""Call topology: a full mesh in a small swarm, neighbours on rings in a large one."""

from __future__ import annotations

from dataclasses import dataclass

from rayhive.membership.rings import Rings
from rayhive.membership.view import MembershipView

#: Largest swarm in which every peer calls every other one.
SMALL_SWARM = 8


@dataclass(frozen=True)
class Topology:
    """Neighbours of one peer.

    Attributes:
        lanes: Peers that get its changes, and lost neighbours that it tries to reach.
        beats: The lanes that also get a call per heartbeat.
        watched: Peers whose silence it notices itself; None for all.
        home: Its neighbours if all lost peers came back.
        rings: The rings of the live peers that can be called.
        small: Whether the swarm is small.
    """

    lanes: frozenset[bytes]
    beats: frozenset[bytes]
    watched: frozenset[bytes] | None
    home: frozenset[bytes]
    rings: Rings
    small: bool

    def watchers(self, peer: bytes, client: bool) -> frozenset[bytes]:
        """Return the peers that watch a peer.

        Args:
            peer: Its id.
            client: Whether it cannot be called: it calls its successors, and they watch it.
        """
        if self.small:
            return self.rings.peers - {peer}
        return self.rings.successors(peer) if client else self.rings.neighbours(peer)


def topology_of(view: MembershipView) -> Topology:
    """Return the neighbours of a view's peer.

    A lost peer is called by the peers that were its neighbours if it came back.
    """
    own = view.own
    known = view.known()
    alive, lost = view.alive_ids() - {own.peer_id}, view.lost()
    clients = {heartbeat.peer_id for heartbeat in known if heartbeat.client_mode}
    callable_ = frozenset(heartbeat.peer_id for heartbeat in known) - clients
    live, mine = alive - clients, set() if own.client_mode else {own.peer_id}
    rings, every = Rings(live | mine), Rings(live | (lost - clients) | mine)
    if len(alive | lost) < SMALL_SWARM:
        watched = callable_ if own.client_mode else None
        return Topology(callable_, callable_, watched, callable_, rings, small=True)
    if own.client_mode:
        home, near = every.successors(own.peer_id), rings.successors(own.peer_id)
        beats, watched = near, frozenset[bytes]()
    else:
        home, near = every.neighbours(own.peer_id), rings.neighbours(own.peer_id)
        beats = rings.successors(own.peer_id)
        watched = frozenset(peer for peer in clients if own.peer_id in rings.successors(peer))
    if len(alive) < SMALL_SWARM:
        near = beats = frozenset(live)
    lanes = near | (home & lost)
    return Topology(lanes, beats, lanes | watched, home, rings, small=False)
