"""Progress of the swarm, known early and exactly enough to start rounds at once.

Differs from :class:`hivemind.optim.progress_tracker.ProgressTracker` in three ways:

* a peer announces itself before it has accumulated its first sample, so that the swarm can
  wait for everybody and the first round already has the right group;
* a round is due when the samples are there, never because an estimate says that they should
  be: hivemind's estimate once fired after one batch of a round;
* the number of peers that will take part in the next round is told apart from those that are
  still behind.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from hivemind.optim.progress_tracker import (
    GlobalTrainingProgress,
    LocalTrainingProgress,
    ProgressTracker,
)
from hivemind.utils import get_dht_time

#: Peers on a link of milliseconds see each other's progress this often [s]; hivemind's defaults
#: (0.5, 3, 10) would make a round wait for the next look.
TRACKER_OPTIONS = {
    "min_refresh_period": 0.02,
    "default_refresh_period": 0.2,
    "max_refresh_period": 1.0,
}

#: A peer may be one round behind another, and what is known of it one more.
REPORTED_SLACK = 2


class LiveProgressTracker(ProgressTracker):
    """Tracks the progress of this peer and of the swarm.

    Takes hivemind's arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._fetched = threading.Condition()
        self._live_peers = 0
        super().__init__(*args, **kwargs)
        self.should_report_progress.set()

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        return self._live_peers

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer may go on to the next round now."""
        return bool(
            self.global_epoch > self.local_progress.epoch
            or self.global_progress.samples_accumulated >= self.target_batch_size
        )

    def wait_for_peers(self, peers: int, timeout: float) -> bool:
        """Wait until so many peers have announced themselves.

        Args:
            peers: The number of peers, this one included.
            timeout: Longest wait [s].

        Returns:
            Whether they have.
        """
        deadline = time.monotonic() + timeout
        with self._fetched:
            while self._live_peers < peers:
                if time.monotonic() >= deadline:
                    return False
                self.fetch_now()
                self._fetched.wait(min(0.1, max(0.0, deadline - time.monotonic())))
        return True

    def fetch_now(self) -> None:
        """Ask the DHT now instead of at the next planned time."""
        self.global_progress.next_fetch_time = 0.0
        self.global_state_updated.set()

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        progress = super()._parse_swarm_progress_data(metadata)
        live = 0
        if isinstance(metadata, dict):
            for entry in metadata.values():
                if entry.value is None:
                    continue
                peer = LocalTrainingProgress.parse_obj(entry.value)
                live += peer.epoch >= progress.epoch - REPORTED_SLACK
        with self._fetched:
            self._live_peers = live
            self._fetched.notify_all()
        return progress

    async def _progress_reporter(self) -> None:
        """Publish this peer's progress whenever it changes, and often enough not to expire."""
        loop = asyncio.get_running_loop()
        last_report = -float("inf")
        pending: set[asyncio.Task[Any]] = set()
        try:
            while not self.shutdown_triggered.is_set():
                wait = max(0.0, last_report - get_dht_time() + self.metadata_expiration / 3)
                await loop.run_in_executor(None, self.should_report_progress.wait, wait)
                self.should_report_progress.clear()
                if self.shutdown_triggered.is_set():
                    break
                progress = self.local_progress
                last_report = get_dht_time()
                # the entry's own time decides when a peer counts as silent
                task = asyncio.create_task(self._store(progress, last_report))
                pending.add(task)
                task.add_done_callback(pending.discard)
        finally:
            for task in pending:
                task.cancel()

    async def _store(self, progress: LocalTrainingProgress, now: float) -> None:
        await asyncio.wait_for(
            self.dht.store(
                key=self.training_progress_key,
                subkey=self._local_public_key,
                value=progress.dict(),
                expiration_time=now + self.metadata_expiration,
                return_future=True,
            ),
            timeout=self.metadata_expiration,
        )
