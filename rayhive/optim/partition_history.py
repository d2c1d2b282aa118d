"""Rounds that a peer committed during a network partition, and the members of its side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rayhive.membership.view import Reunion

#: Groups of past rounds that are kept, to find the peer's side of a partition afterwards.
GROUPS_KEPT = 8


class PartitionHistory:
    """Recent groups of a peer, and its latest network partition. Uses neither network nor clock.

    After a partition, the parameters of each side count by the rounds that it committed (see
    :func:`rayhive.averaging.state_averager.weights`). Each peer announces those rounds and the
    members of its side.

    Attributes:
        rounds_apart: Number of rounds that this peer committed during the partition. None without
            a partition, and after parameters were averaged with all peers that came back.
        side: Sorted peer ids of this peer's side of the partition.
        lost: Peer ids of the other sides.
    """

    def __init__(self) -> None:
        self.rounds_apart: int | None = None
        self.side: list[bytes] = []
        self.lost: frozenset[bytes] = frozenset()
        self._groups: deque[frozenset[bytes]] = deque(maxlen=GROUPS_KEPT)

    def note_group(self, members: Iterable[bytes]) -> None:
        """Note the group of a round: the peer ids of its members, this peer among them."""
        self._groups.append(frozenset(members))

    def note_reunion(self, reunion: Reunion, round_: int) -> None:
        """Note that lost peers are back.

        Lost peers come back one by one, and some are lost again for a moment while links recover.
        Rounds therefore count from the loss of the first of them.

        Args:
            reunion: The peers, and the round after which the first of them was lost.
            round_: The round that this peer has finished.
        """
        before, self.lost = self.rounds_apart, self.lost | reunion.peers
        self.rounds_apart = max(round_ - reunion.since, before or 0)
        if self.rounds_apart != before:
            groups = tuple(self._groups)  # a thread may append meanwhile
            without = [group for group in groups if not self.lost & group]
            self.side = sorted(without[-1]) if without else []

    def note_averaged(
        self, group: Iterable[bytes], any_alive: Callable[[Iterable[bytes]], bool]
    ) -> None:
        """Note that parameters were averaged; the partition is over once no lost peer is missing.

        Args:
            group: Peer ids of the group.
            any_alive: Returns whether any of some peers is alive.
        """
        members = frozenset(group)
        if self.lost & members and not any_alive(self.lost - members):
            self.reset()

    def reset(self) -> None:
        """Forget the partition: the parameters of all sides are the same again."""
        self.rounds_apart, self.lost = None, frozenset()
