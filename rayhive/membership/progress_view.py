"""Progress of the swarm as one peer knows it: the queries of its trainer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Literal

from hivemind.optim.progress_tracker import GlobalTrainingProgress
from hivemind.utils import PerformanceEMA, get_dht_time

from rayhive.membership.view import MembershipView, Reunion


class ProgressView:
    """The questions that a progress tracker answers from its view.

    Attributes:
        comes_first: The first averaging of a round: the one that peers come to from their batches.
    """

    _view: MembershipView
    _lock: threading.Condition
    ended: threading.Event
    performance_ema: PerformanceEMA
    target_batch_size: int
    comes_first: Literal["averaged", "synchronised"] = "averaged"

    def take_part(self, takes_part: bool) -> None:
        """Say whether rounds have to wait for this peer from now on."""
        raise NotImplementedError

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        with self._lock:
            return self._view.in_step()

    @property
    def global_epoch(self) -> int:
        """The last round that anybody has finished."""
        with self._lock:
            return self._view.newest_round()

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        """How far the swarm is."""
        with self._lock:
            everybody = self._view.taking_part()
            rate = sum(p.samples_per_second for p in everybody) or self.performance_ema.eps
            samples = self._view.samples()
            lacking = max(0, self.target_batch_size - samples)
            return GlobalTrainingProgress(
                epoch=self._view.newest_round(),
                samples_accumulated=samples,
                target_batch_size=self.target_batch_size,
                num_peers=self._view.in_step(),
                num_clients=sum(p.client_mode for p in everybody),
                eta_next_epoch=get_dht_time() + lacking / rate,
                next_fetch_time=get_dht_time(),
            )

    def has_missed(self, round_: int, timeout: float) -> bool:
        """Return whether others have averaged a round without this peer.

        If they are in the middle of one that it cannot join, wait until they are done with it.

        Args:
            round_: The round after the last one that this peer has finished.
            timeout: Longest wait [s].
        """
        deadline = time.monotonic() + timeout
        view, kind = self._view, self.comes_first
        with self._lock:
            while view.newest_averaged(kind) > view.newest_round():
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set():
                    break
                self._lock.wait(min(left, 0.1))
            done = max(self._view.newest_averaged(self.comes_first), self._view.newest_round() - 1)
            return done >= round_

    def was_met(self, round_: int) -> bool:
        """Return whether peers that take part have averaged the gradients of a round in a group."""
        own = self._view.own.peer_id
        with self._lock:
            others = [p for p in self._view.taking_part() if p.peer_id != own]
            return any(p.met_averaged >= round_ for p in others)

    def take_reunion(self) -> Reunion | None:
        """Return who came back that was lost, since the last call."""
        with self._lock:
            return self._view.take_reunion()

    def any_here(self, peers: Iterable[bytes]) -> bool:
        """Return whether any of these is known and alive."""
        with self._lock:
            return any(self._view.is_here(peer) for peer in peers)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer may go on to the next round now."""
        with self._lock:
            behind = self._view.newest_round() > self._view.own.round
            due = self._view.samples() >= self.target_batch_size
            return behind or due or self._view.is_in_a_hurry()

    @property
    def estimated_next_update_time(self) -> float:
        """When the next round is due, at the present speed [s on the DHT's clock]."""
        eta: float = self.global_progress.eta_next_epoch
        return get_dht_time() if self.ready_to_update_epoch else eta

    def wait_for_peers(self, peers: int, timeout: float) -> bool:
        """Take part, and wait until so many peers do.

        Args:
            peers: The number of peers, this one included.
            timeout: Longest wait [s].

        Returns:
            Whether they do.
        """
        self.take_part(True)
        deadline = time.monotonic() + timeout
        with self._lock:
            # none of them makes progress while it waits here
            while sum(peer.takes_part for peer in self._view.present()) < peers:
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set():
                    return False
                self._lock.wait(min(left, 1.0))
        return True
