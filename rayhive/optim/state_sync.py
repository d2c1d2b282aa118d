"""How a peer that comes, or has fallen behind, gets to where the others are."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from hivemind.utils import get_logger

from rayhive.averaging.factory import takes_over_state
from rayhive.optim.components import OptimizerComponents

logger = get_logger(__name__)

#: Groups that are remembered, to know who was there before others came back.
GROUPS_KEPT = 8


class StateSync(OptimizerComponents):
    """Takes over the newest state that it can get, and counts for nothing until it is the others'.

    Attributes:
        _stale: The parameters are of an older round than the peer says: they must not count.
        _keeps: Its gradients count all the same: it kept what it had accumulated.
        _settling: The state was loaded, and parameters were not averaged since.
        _astray: The last round since which its parameters may differ from the others', as it failed
            or was partial; 0 if they do not.
        _apart: Rounds that it did while it had lost others who are here again; None once the
            parameters of all of them were averaged.
        _half: Who was with it then.
        _lost: Who was not.
        _groups: Who was in its last rounds.
        _went_on: When the peer went on to the present round [s of ``time.perf_counter``].
    """

    _load_state_attempts: int

    def __init__(self, **kwargs: Any) -> None:
        self._stale = self._settling = self._keeps = False
        self._astray = 0
        self._apart: int | None = None
        self._half: list[bytes] = []
        self._lost: frozenset[bytes] = frozenset()
        self._groups: deque[frozenset[bytes]] = deque(maxlen=GROUPS_KEPT)
        self._went_on = time.perf_counter()
        super().__init__(**kwargs)

    @property
    def _counts_for_nothing(self) -> bool:
        """Whether its gradients must not count: none of them is of the others' parameters."""
        return self._stale and not self._keeps

    def _should_load_state_from_peers(self) -> bool:
        """Say whether this peer has missed a round.

        One that is a round behind can still take part in the round that the others have begun;
        hivemind may make it throw its samples away and download the state instead, while the
        others wait for it.
        """
        if self._diverged:
            self._diverged = False
            return True
        self._note_reunion()
        behind: bool = self.local_epoch < self.tracker.global_epoch - 1
        if behind and self._apart:
            self._join_again()
            return False
        if behind and self._settling:  # rounds are shorter than loading the state
            self._go_on_from(self.local_epoch, self._keeps)
            return False
        return behind

    def _note_reunion(self) -> None:
        """See whether peers are here again that were lost, and what this one did without them."""
        reunion = self.tracker.take_reunion()
        if reunion is None:
            return
        # parameters have to be averaged as soon as all are together
        self._astray = self.local_epoch + 1
        before, self._lost = self._apart, self._lost | reunion.peers
        # They come one by one, and some are lost again for a moment while links come back: that
        # makes nothing less of what was done without the first of them.
        self._apart = max(self.local_epoch - reunion.since, before or 0)
        if self._apart != before:
            groups = tuple(self._groups)  # a thread may add one meanwhile
            without = [group for group in groups if not self._lost & group]
            self._half = sorted(without[-1]) if without else []

    def _join_again(self) -> None:
        """Stand where the others are, who went further in the same time, with what was learnt."""
        self.state_averager.step(wait_for_delayed_updates=True)
        before, newest = self.local_epoch, self.tracker.global_epoch
        self.state_averager.local_epoch = newest
        self.tracker.skip_to(newest)
        if not self.client_mode:
            self.state_averager.state_sharing_priority = newest
            if self.use_gradient_averaging:
                self.grad_averager.state_sharing_priority = newest
        self._emit("reunited", round_before=before, round=newest, apart=self._apart)

    def _state_gather(self, next_round: int) -> list[Any]:
        """Return what the others have to know in order to weigh this peer's parameters."""
        self._note_reunion()  # they may have come back in the middle of the round
        return [next_round, [peer.hex() for peer in self._half], self._apart]

    def load_state_from_peers(self, *, keep_gradients: bool = False, **kwargs: Any) -> None:
        """Take over the newest state of the swarm; keep one's own if no peer can give it.

        hivemind retries for ever on errors.

        Args:
            keep_gradients: Keep what was accumulated: it enters the next round.
            kwargs: As hivemind's.
        """
        self.tracker.take_part(False)  # nobody has to wait
        self.state_averager.step(wait_for_delayed_updates=True)
        began, round_before = time.perf_counter(), self.local_epoch
        received = self._downloaded_bytes()
        kwargs.setdefault("timeout", self.load_state_timeout)
        with self.tracker.pause_updates():
            for _ in range(self._load_state_attempts):
                try:
                    self.state_averager.load_state_from_peers(**kwargs)
                    self._emit_refused_states()
                    averager = self.grad_averager
                    if averager is not None and takes_over_state(type(averager)):
                        averager.load_state_from_peers(**kwargs)
                    break
                except Exception as error:
                    self._watch.check()
                    logger.warning(f"could not load the state from a peer: {error!r}")
            loaded = self.local_epoch
            self._settling, self._apart, self._lost = True, None, frozenset()
            kept = self._go_on_from(loaded, keep_gradients)
        self._emit(
            "state_loaded",
            round_before=round_before,
            round_of_state=loaded,
            round=self.local_epoch,
            seconds=time.perf_counter() - began,
            received_bytes=self._downloaded_bytes() - received,
            kept=kept,
        )

    def _downloaded_bytes(self) -> int:
        """Return what this peer has received of others' states so far [B]."""
        averagers = (self.state_averager, self.grad_averager)
        return sum(getattr(averager, "downloaded_bytes", 0) for averager in averagers)

    def _emit_refused_states(self) -> None:
        refused = getattr(self.state_averager, "refused_states", [])
        while refused:
            self._refuse(self.local_epoch, "state", **refused.pop(0))

    def _go_on_from(self, loaded: int, keep_gradients: bool = False) -> int:
        """Stand where the others are, with the parameters of a round that may be older.

        While this peer was loading, the others went on. Until their parameters have replaced its
        own, these count for nothing.

        Returns:
            How many accumulated samples are left.
        """
        newest = max(loaded, self.tracker.global_epoch)
        self.state_averager.local_epoch = newest
        self._stale |= newest > loaded
        self._keeps = keep_gradients
        kept = 0
        if self.use_gradient_averaging:
            if not keep_gradients:
                self.grad_averager.reset_accumulated_grads_()
            kept = self.grad_averager.local_samples_accumulated
        self.tracker.jump_to(newest, kept)
        self.tracker.take_part(True)
        for averager in () if self.client_mode else (self.state_averager, self.grad_averager):
            if averager is not None:
                averager.state_sharing_priority = newest
        self._went_on = time.perf_counter()
        return kept
