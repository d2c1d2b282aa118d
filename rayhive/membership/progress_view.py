"""Progress of the swarm, as one peer knows it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rayhive.membership.view import MembershipView, Reunion

#: Interval between two checks of a wait for a round's end, and for peers [s].
ROUND_CHECK_S, PEERS_CHECK_S = 0.1, 1.0
#: Speeds below this one are not known yet [samples/s].
SLOWEST = 1e-6
#: Time for which all peers must be seen to wait before one of them computes again [s]. The
#: announcements of a round that begins arrive sooner.
ALL_WAIT_S = 2.0


def shares(total: int, weights: Mapping[bytes, float]) -> dict[bytes, int]:
    """Divide a number of batches by weights, with the method of largest remainders.

    Args:
        total: The number.
        weights: Weight of each peer, by its id.
    """
    each = total / sum(weights.values())
    quotas = {peer: weight * each for peer, weight in weights.items()}
    found = {peer: int(quota) for peer, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda peer: (found[peer] - quotas[peer], peer))
    for peer in by_remainder[: total - sum(found.values())]:
        found[peer] += 1
    return found


@dataclass
class ProgressView:
    """Queries of a training thread about the swarm. Every method takes the view's lock.

    Attributes:
        view: The peer's membership view.
        target_batch_size: Samples of a round, over the swarm.
        ended: Set when the view is no longer kept up to date; all waits end then.
        several_groups: Whether a round has several groups. Others have averaged it then without
            this peer having missed it.
    """

    view: MembershipView
    target_batch_size: int
    ended: threading.Event
    several_groups: bool = False

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        with self.view.lock:
            return self.view.live_peers()

    @property
    def has_company(self) -> bool:
        """Whether another live peer takes part in the run, or is on a break."""
        with self.view.lock:
            return bool(self.view.company())

    @property
    def newest_round(self) -> int:
        """The last round that a peer of the swarm has finished."""
        with self.view.lock:
            return self.view.newest_round()

    @property
    def is_round_due(self) -> bool:
        """Whether this peer may begin the next round now.

        With several groups, all others must have begun the round before: no group gets far ahead.
        """
        with self.view.lock:
            last = self.view.own.round if self.several_groups else 0
            others = [p for p in self.view.participants() if p.peer_id != self.view.own.peer_id]
            if any(max(p.round, p.entered) < last for p in others):
                return False
            return self.view.is_round_due(self.target_batch_size)

    def share_of_lacking(self, announced: int) -> float:
        """Return this peer's share of the samples that the next round lacks.

        Args:
            announced: Own samples that the other peers know of.
        """
        with self.view.lock:
            lacking = (
                self.target_batch_size - (self.view.samples() - self.view.own.samples) - announced
            )
            return lacking / max(1, self.view.live_peers())

    def batches_by_speed(self, batch: int) -> int | None:
        """Return this peer's batches of a round if all peers keep the speeds that they announced.

        Peers with the same news and batches as large come to numbers that add up to a round, by
        the method of largest remainders. None if a speed is not known yet, or there are no other
        peers.

        Args:
            batch: Samples of a batch.
        """
        with self.view.lock:
            own = self.view.own.peer_id
            speeds = {
                p.peer_id: p.samples_per_second
                for p in self.view.participants()
                if p.peer_id != own and not self.view.is_left_out(p)
            }
            if not speeds:
                return None
            speeds[own] = self.view.loud.samples_per_second
        if min(speeds.values()) < SLOWEST:
            return None
        return shares(math.ceil(self.target_batch_size / batch), speeds)[own]

    def has_missed(
        self, round_: int, timeout: float, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Return whether other peers have averaged a round without this one.

        If they are in the middle of a round that this peer cannot join, wait for its end.

        Args:
            round_: The round after the last one that this peer has finished.
            timeout: Longest wait [s].
            check: Called about every 0.1 s during the wait; an error that it raises ends it.
        """
        deadline = time.monotonic() + timeout
        view = self.view
        with self.view.lock:
            if self.several_groups:
                return view.newest_round() - 1 >= round_
            while view.newest_averaged() > view.newest_round():
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set():
                    break
                self.view.lock.wait(min(left, ROUND_CHECK_S))
                check()
            return max(view.newest_averaged(), view.newest_round() - 1) >= round_

    def was_met(self, round_: int) -> bool:
        """Return whether live peers have averaged a round's gradients in a group.

        They may be on a break since.
        """
        if self.several_groups:
            return False
        with self.view.lock:
            return any(p.met_averaged >= round_ for p in self.view.company())

    def wait_until_met(
        self, round_: int, timeout: float, check: Callable[[], None] = lambda: None
    ) -> bool:
        """Wait until peers have announced that they averaged a round's gradients in a group.

        The wait ends when no other peer is left, such as at the end of a run.

        Args:
            round_: The round.
            timeout: Longest wait [s].
            check: Called about every 0.1 s; an error that it raises ends the wait.

        Returns:
            Whether they have.
        """
        with self.view.lock:
            self._wait(lambda: self.was_met(round_) or not self.view.company(), timeout, check)
            return self.was_met(round_)

    def wait_until_due(self, check: Callable[[], None] = lambda: None) -> bool:
        """Wait until this peer may begin the next round.

        The other peers compute meanwhile. The wait ends if this peer is alone, as stragglers take
        no part, or if all others wait for the same round.

        Args:
            check: Called about every 0.1 s; an error that it raises ends the wait.

        Returns:
            Whether it may; False once it is alone, or nobody computes.
        """
        waits_since = math.inf

        def over() -> bool:
            nonlocal waits_since
            now = time.monotonic()
            waits_since = min(waits_since, now) if self._all_wait() else math.inf
            alone = self.view.live_peers() <= 1
            return self.is_round_due or alone or now - waits_since > ALL_WAIT_S

        with self.view.lock:
            self._wait(over, math.inf, check)
            return self.is_round_due

    def _all_wait(self) -> bool:
        """Return whether the other peers have all done their part of this peer's next round."""
        own = self.view.own
        others = (p for p in self.view.participants() if p.peer_id != own.peer_id)
        return all(p.entered > own.round for p in others)

    def older_peers(self) -> frozenset[bytes]:
        """Return the ids of the live peers that joined the run before this one."""
        with self.view.lock:
            own = self.view.own
            return frozenset(
                p.peer_id
                for p in self.view.alive()
                if (p.since, p.peer_id) < (own.since, own.peer_id)
            )

    @property
    def newest_known(self) -> int:
        """The last round that another peer has finished, as far as known; it may be dead now."""
        with self.view.lock:
            return max((p.round for p in self.view.known()), default=0)

    def trained_peers(self) -> frozenset[bytes]:
        """Return the ids of the other live peers that have the state of a round of the run."""
        own = self.view.own.peer_id
        with self.view.lock:
            trained = (p for p in self.view.alive() if p.round > 0 and not p.untrained)
            return frozenset(p.peer_id for p in trained if p.peer_id != own)

    @property
    def rests(self) -> bool:
        """Whether all other live peers that have the state of the run are on a break."""
        with self.view.lock:
            present = {p.peer_id for p in self.view.participants()}
            return self.has_company and present.isdisjoint(self.trained_peers())

    def wait_for_trained_peer(self, timeout: float, check: Callable[[], None]) -> bool:
        """Wait until another live peer has the state of a round of the run.

        Args:
            timeout: Longest wait [s].
            check: Called about every 0.1 s; an error that it raises ends the wait.

        Returns:
            Whether one has.
        """
        with self.view.lock:
            self._wait(lambda: bool(self.trained_peers()), timeout, check)
            return bool(self.trained_peers())

    def _wait(self, over: Callable[[], bool], timeout: float, check: Callable[[], None]) -> None:
        """Wait until a condition holds, the time is over, or the view is no longer up to date."""
        deadline = time.monotonic() + timeout
        while not over():
            left = deadline - time.monotonic()
            if left <= 0 or self.ended.is_set():
                break
            self.view.lock.wait(min(left, ROUND_CHECK_S))
            check()

    def note_unmet(self, round_: int) -> None:
        """Note that a round of this peer ended without a group.

        With several groups, pairs are drawn among the peers that are known to be there.
        """
        if not self.several_groups:
            with self.view.lock:
                self.view.note_unmet(round_)

    def take_reunion(self) -> Reunion | None:
        """Return the lost peers that came back since the last call; None if there are none."""
        with self.view.lock:
            return self.view.take_reunion()

    def any_present(self, peers: Iterable[bytes]) -> bool:
        """Return whether any of these other peers is alive, here or by what others pass on."""
        with self.view.lock:
            return any(self.view.is_present(peer) for peer in peers)

    def wait_for_peers(self, peers: int, timeout: float) -> bool:
        """Wait until a number of peers take part.

        Args:
            peers: The number, this peer included.
            timeout: Longest wait [s].

        Returns:
            Whether they do.
        """
        deadline = time.monotonic() + timeout
        with self.view.lock:
            # stragglers count: no peer makes progress while it waits here
            while sum(peer.takes_part for peer in self.view.alive()) < peers:
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set():
                    return False
                self.view.lock.wait(min(left, PEERS_CHECK_S))
        return True
