"""State synchronisation: how a peer that joins or falls behind gets to the swarm's round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.utils import get_logger

from rayhive.averaging.factory import takes_over_state
from rayhive.errors import PeerError
from rayhive.events import Rejected, Reunited, StateLoaded, SteppedIn
from rayhive.optim import background
from rayhive.optim.peer_state import PeerState

logger = get_logger(__name__)


class StateSync:
    """Downloads the newest state of the swarm when this peer needs it.

    A peer also steps out of the rounds while it validates, saves a checkpoint or loads data. The
    gradients that it has accumulated stay, and enter the round in which it is back. The same holds
    for a peer without which a quorum began rounds (:class:`rayhive.averaging.quorum.Quorum`): it
    downloads the state after its batch, and waits for the next round.

    A peer that joins a run is untrained until it has the state of the run, by a download or by an
    averaging of parameters with a peer that has it. It shares its state with nobody until then, and
    fails when no peer that has the state is left: it would begin the run anew.

    Args:
        peer: The peer.
        load_state_timeout: Longest download [s].
        attempts: Downloads to try before the peer keeps its own state.

    Attributes:
        round_began: When the peer went on to its present round [s of ``time.perf_counter``].
    """

    def __init__(self, peer: PeerState, load_state_timeout: float, attempts: int) -> None:
        self._peer, self._load_state_timeout, self._attempts = peer, load_state_timeout, attempts
        self.round_began = time.perf_counter()
        self._in_step, self._older, self._loaded = False, frozenset[bytes](), False
        self._after_download: int | None = None
        self._parameters_of: int | None = None  # while the peer is stale

    @property
    def _round(self) -> int:
        return int(self._peer.state_averager.local_epoch)

    @property
    def _stale_round(self) -> int | None:
        """The round of the parameters, if that is older than the peer's."""
        return self._parameters_of if self._peer.consistency.stale else None

    @property
    def _averagers(self) -> Sequence[DecentralizedAverager]:
        return (self._peer.state_averager, self._peer.grad_averager)

    # -- decisions ---------------------------------------------------------------------------------

    def needs_download(self) -> bool:
        """Return whether this peer has to download the state before it goes on.

        A peer that is one round behind can still take part in the round that the other peers have
        begun. hivemind may make it drop its samples and download the state while they wait for it.
        """
        if self._peer.consistency.take_divergence() or self._has_nothing_to_go_on_from():
            return True
        behind = self._round < self._peer.tracker.global_epoch - 1
        self.note_reunion()  # afterwards: a lost peer may have come back just now
        if behind and self._peer.rounds_apart:
            self._join_newest_round()
            return False
        if behind and self._keeps_late_gradients():
            return False  # after the batch, see :meth:`take_over_missed_round`
        if behind and self._peer.consistency.settling:  # rounds are shorter than a download
            self._jump_to_newest(self._round, self._peer.consistency.keeps_gradients)
            return False
        return behind

    def _has_nothing_to_go_on_from(self) -> bool:
        """Return whether this peer has to get the state of the run before anything else."""
        swarm, untrained = self._peer.tracker.swarm, self._peer.untrained
        if not untrained and (self._round > 0 or swarm.newest_known <= 1):
            return False
        return self._peer.pairs or not swarm.trained_peers()

    def note_batch(self) -> None:
        """Note the begin of a batch, whose gradients are of the present parameters.

        With a quorum, a peer that is behind downloads the state before the batch, not after it.
        """
        if self._peer.quorum:
            swarm = self._peer.tracker.swarm
            behind = self._round < swarm.newest_round - 1
            if behind and not self._peer.rounds_apart:
                self.download(keep_gradients=True)
            self._in_step = self._round >= swarm.newest_round - 1
            self._older, self._loaded = swarm.older_peers(), False

    def _keeps_late_gradients(self) -> bool:
        """Return whether the gradients of a peer that is behind are of parameters of the run.

        A peer that has not taken part yet, and did not know all older peers when it began its
        batch, may have parameters of its own.
        """
        if not (self._peer.quorum and self._in_step):
            return False
        return self._round > 0 or self._peer.tracker.swarm.older_peers() <= self._older

    def note_reunion(self) -> None:
        """Note lost peers that are back, and the rounds that this peer committed without them.

        Before the first round all peers have the parameters with which the run began.
        """
        swarm, partitions = self._peer.tracker.swarm, self._peer.partitions
        reunion = swarm.take_reunion()
        if reunion is None or self._round == swarm.newest_known == 0:
            return
        if not partitions.was_none(reunion, self._round):
            # parameters have to be averaged as soon as all peers are together
            self._peer.consistency.note_failure(self._round + 1)
            if not swarm.any_present(partitions.lost):
                partitions.reset()  # the partition before this one is over
            partitions.note_reunion(reunion, self._round, self._peer.tracker.view.alive_ids())

    def gathered(self, next_round: int) -> list[Any]:
        """Return this peer's entry for a group that averages parameters.

        Returns:
            The round, the hexadecimal peer ids of this peer's side of a partition, and the rounds
            that it committed there.
        """
        self.note_reunion()  # lost peers may have come back during the round
        side = [peer.hex() for peer in self._peer.partitions.side]
        return [next_round, side, self._peer.partitions.rounds_apart]

    # -- breaks ------------------------------------------------------------------------------------

    def return_from_break(self) -> None:
        """Take part again if this peer stepped out, with the newest state if it missed a round.

        After a partition it keeps the work of its side, as in :meth:`needs_download`.
        """
        seconds = self._peer.tracker.begin_batch()
        if seconds is None:
            return
        before = self._round
        missed = self._missed(before + 1)
        self.note_reunion()
        if missed and not self._peer.rounds_apart:
            self.download(keep_gradients=True)
        else:
            self._peer.tracker.take_part(True)
        self._peer.consistency.returned = True
        self._peer.reporter.emit(SteppedIn(round_before=before, round=self._round, seconds=seconds))

    def catch_up(self) -> bool:
        """Take over missed rounds; return whether this peer may begin the round that is due."""
        if self._waits_for_the_state():
            return False
        leaves = self._peer.tracker.view.own.hurry > self._round
        while self.take_over_missed_round():
            if leaves:
                self._peer.tracker.hurry(self._round + 1)
            if not self._wait_for_next_round():
                return leaves and self._peer.quorum  # it hands over to nobody: it steps alone
        return True

    def _waits_for_the_state(self) -> bool:
        """Return whether a round would replace the state of peers that are on a break.

        The parameters of this peer do not count. Without one of those in its round, it would go on
        from them, and the others would take over its round when they are back.
        """
        peer, swarm = self._peer, self._peer.tracker.swarm
        if peer.pairs or not (peer.untrained or peer.consistency.stale):
            return False
        return swarm.rests if peer.untrained else swarm.live_peers <= 1 and swarm.has_company

    def take_over_missed_round(self) -> bool:
        """Download the state if other peers have averaged the round that is due.

        They may have begun it just when this peer came back. Its gradients enter the next round; a
        step of its own would make its parameters differ. Peers of two sides of a partition merge
        their work instead.

        Returns:
            Whether they have averaged it.
        """
        self.note_reunion()
        due, swarm = self._round + 1, self._peer.tracker.swarm
        if self._peer.merges_rounds:
            return False
        behind = self._peer.quorum and self._round < swarm.newest_round - 1
        if not (behind or swarm.was_met(due)):
            return False
        self._missed(due)  # wait for the end of the round, which may be under way
        if self._loaded or self._follows_download(due):
            # rounds are shorter than a download: the next group averages parameters
            self._jump_to_newest(self._round, keep_gradients=True)
        else:
            self.download(keep_gradients=True)
            self._loaded = self._peer.quorum
        return True

    def _follows_download(self, round_: int) -> bool:
        """Return whether a round is the first one after a download, and only parameters are older.

        Factors of an older round would spoil those of the group, and local steps would start from
        other parameters than the group's. With a quorum a peer downloads again, and waits.
        """
        peer = self._peer
        lasting = takes_over_state(type(peer.grad_averager)) or peer.local_steps is not None
        settling = peer.consistency.settling and not (lasting or peer.quorum)
        return settling and round_ == self._after_download

    def _wait_for_next_round(self) -> bool:
        """Wait for the next round after a missed one, instead of computing another batch.

        A peer whose batches take longer than the others' rounds would else miss every round.

        Returns:
            Whether the round may begin; False if this peer is alone, if all others wait as well, or
            if rounds have no quorum.
        """
        peer, tracker = self._peer, self._peer.tracker
        if not peer.quorum:
            return False
        tracker.enter(self._round + 1)  # the others need not wait for a batch
        with tracker.pause_updates():
            due = tracker.swarm.wait_until_due(peer.watchdog.check)
        if not due:
            tracker.enter(self._round)  # it computes again
        return due

    def _missed(self, round_: int) -> bool:
        return self._peer.tracker.swarm.has_missed(
            round_, self._peer.averaging_timeout, check=self._peer.watchdog.check
        )

    # -- downloads ---------------------------------------------------------------------------------

    def download(self, *, keep_gradients: bool = False, shared: int = 0, **options: Any) -> None:
        """Download the newest state of the swarm; keep the present one if no peer can send it.

        hivemind retries for ever on errors.

        Args:
            keep_gradients: Keep the accumulated gradients for the next round.
            shared: The newest round whose state a peer is known to have shared.
            options: Options of hivemind's ``load_state_from_peers``.

        Raises:
            PeerError: The peer is untrained, and no peer that has the state of the run is left.
        """
        self._peer.tracker.take_part(False)  # no round has to wait for this peer
        background.finish(self._peer)
        began, round_before = time.perf_counter(), self._round
        received = self._downloaded_bytes()
        options.setdefault("timeout", self._load_state_timeout)
        newest = max(shared, self._peer.tracker.swarm.newest_known)
        if round_before == 0 < newest:
            self._peer.set_untrained(True)
        with self._peer.tracker.pause_updates():
            downloaded = self._try_to_download(options)
            while self._peer.untrained and not self._peer.tracker.swarm.trained_peers():
                self._await_trained_peer(newest)
                downloaded = self._try_to_download(options)
            loaded = self._round
            self._parameters_of = None
            self._peer.consistency.settling = True
            self._peer.partitions.reset()
            kept = self._jump_to_newest(loaded, keep_gradients)
            complete = downloaded and not self._peer.untrained
            self._after_download = self._round + 1 if complete else None
            caught_up = self._peer.quorum and downloaded and loaded == self._round
            if caught_up or self._peer.pairs:  # in a pair, older parameters count as any others
                self._peer.consistency.note_caught_up()
        self._peer.reporter.emit(
            StateLoaded(
                round_before=round_before,
                round_of_state=loaded,
                round=self._round,
                seconds=time.perf_counter() - began,
                received_bytes=self._downloaded_bytes() - received,
                kept=kept,
            )
        )

    def _try_to_download(self, options: dict[str, Any]) -> bool:
        """Return whether one of several attempts ended without an error."""
        # the round of its parameters, which is what another state has to be newer than
        if self._peer.untrained:
            self._peer.state_averager.local_epoch = 0
        elif self._stale_round is not None:
            self._peer.state_averager.local_epoch = self._stale_round
        for _ in range(self._attempts):
            try:
                self._download_once(**options)
            except Exception as error:
                self._peer.watchdog.check()
                logger.warning(f"could not load the state from a peer: {error!r}")
                continue
            if self._peer.untrained and self._round > 0:
                self._peer.set_untrained(False)
            return True
        return False

    def _await_trained_peer(self, newest: int) -> None:
        seconds, check = self._peer.averaging_timeout, self._peer.watchdog.check
        if not self._peer.tracker.swarm.wait_for_trained_peer(seconds, check):
            raise PeerError(
                f"the state of the run is lost: this peer joined it after round {newest}, and no "
                f"peer that has the state could be reached for {seconds:g} s"
            )

    def _download_once(self, **options: Any) -> None:
        self._peer.state_averager.load_state_from_peers(**options)
        refused = getattr(self._peer.state_averager, "refused_states", [])
        while refused:
            refusal = Rejected(round=self._round, tensors="state", **refused.pop(0))
            self._peer.reporter.refusal(refusal)
        averager = self._peer.grad_averager
        if takes_over_state(type(averager)):
            averager.load_state_from_peers(**options)

    def _downloaded_bytes(self) -> int:
        """Return the bytes of states that this peer has received so far."""
        return sum(getattr(averager, "downloaded_bytes", 0) for averager in self._averagers)

    # -- changes of the round ----------------------------------------------------------------------

    def share_round(self, round_: int) -> None:
        """Announce ``round_`` as that of the state which joiners can download here.

        The state of a peer that went on to a round with older parameters is that of the older one.
        """
        stale = self._peer.state_averager.stale_round = self._stale_round
        for averager in self._averagers:
            if not averager.client_mode and takes_over_state(type(averager)):
                averager.state_sharing_priority = round_ if stale is None else stale

    def restore(self, round_: int) -> None:
        """Put the peer at the beginning of a round, as its state was loaded from a checkpoint."""
        self._peer.state_averager.local_epoch = round_
        self._peer.tracker.jump_to(round_)
        self.share_round(round_)

    def _join_newest_round(self) -> None:
        """Go to the newest round, and keep the work of this peer's side of a partition."""
        background.finish(self._peer)
        before, newest = self._round, self._peer.tracker.global_epoch
        self._peer.state_averager.local_epoch = newest
        self._peer.tracker.skip_to(newest)
        self.share_round(newest)
        apart = self._peer.partitions.rounds_apart
        self._peer.reporter.emit(Reunited(round_before=before, round=newest, apart=apart))

    def _jump_to_newest(self, loaded: int, keep_gradients: bool) -> int:
        """Go to the newest round with parameters of a round that may be older.

        The other peers go on during a download. This peer's parameters do not count until they are
        averaged.

        Returns:
            The accumulated samples that are kept.
        """
        newest = max(loaded, self._peer.tracker.global_epoch)
        before = self._stale_round
        self._parameters_of = loaded if before is None else min(loaded, before)
        self._peer.state_averager.local_epoch = newest
        self._peer.consistency.note_jump(behind=newest > loaded, keeps_gradients=keep_gradients)
        if not keep_gradients:
            self._peer.grad_averager.reset_accumulated_grads_()
            if self._peer.local_steps is not None:
                self._peer.local_steps.drop()
        kept: int = self._peer.grad_averager.local_samples_accumulated
        self._peer.tracker.jump_to(newest, kept)
        self._peer.tracker.take_part(True)
        self.share_round(newest)
        self.round_began = time.perf_counter()
        return kept
