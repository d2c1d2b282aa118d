"""Progress tracker of the swarm, in place of :class:`hivemind.optim.progress_tracker`'s.

It has the interface that :class:`rayhive.optim.optimizer.RayhiveOptimizer` and the methods that it
inherits use, and differs in the following:

* Peers send their progress to each other directly (:mod:`rayhive.membership.heartbeat`). hivemind's
  poll the DHT, so that a round waits for the next poll.
* The death of a peer is noticed within seconds, not when its entry in the DHT expires.
* A peer announces itself before its first sample, and announces when it no longer takes part, so
  rounds begin with every peer and wait for none that left.
* A round is due when its samples are there, never because an estimate predicts them. hivemind's
  estimate once fired after one batch of a round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from hivemind.dht import DHT
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import PerformanceEMA, get_dht_time

from rayhive.errors import PeerError
from rayhive.membership.averager_members import AveragerMembers, Members, OnMembers
from rayhive.membership.event_loop import LoopThread
from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.peer_links import PeerLinks
from rayhive.membership.progress_view import ProgressView
from rayhive.membership.round_wait import RoundWait
from rayhive.membership.view import Heartbeat, MembershipView

#: The two kinds of averaging, by the field of an announcement that counts their rounds.
KINDS = ("averaged", "synchronised")
#: A peer without a message for so long counts as dead [s].
SILENCE_S = 4.0
#: Longest time between two batches before a peer steps out of the swarm's rounds [s].
BREAK_S = 0.5
#: Interval between two checks for a break [s].
CHECK_S = 0.1
#: Rounds stop waiting for a peer that computes without progress for so long [s].
STRAGGLER_TIMEOUT_S = 60.0

#: Options of hivemind's tracker that have no meaning here, such as when it polls the DHT.
HIVEMINDS_ALONE = frozenset(
    {
        "min_refresh_period", "default_refresh_period", "max_refresh_period", "daemon",
        "expected_drift_peers", "expected_drift_rate", "private_key", "status_loglevel",
    }
)  # fmt: skip


class LiveProgressTracker:
    """Announces the progress of this peer and tracks that of the swarm, in a thread.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        target_batch_size: Samples of a round, over the swarm.
        client_mode: Whether this peer cannot be called; default: as the DHT.
        heartbeat: Interval between two heartbeats [s].
        silence: A peer without a message for so long counts as dead [s]; default 4 s, or
            ``metadata_expiration`` if that is shorter.
        straggler_timeout: Rounds stop waiting for a peer that computes without progress for so
            long, until it makes progress again [s].
        quorum: Whether rounds may begin without peers that compute, which catch up then.
        metadata_expiration: How long an entry in the DHT is valid [s].
        performance_ema_alpha: Smoothing of samples per second.
        clock: Monotonic time for breaks [s].
        start: Start at once.
        hiveminds: Further arguments of hivemind's tracker, which have no meaning here.

    Attributes:
        view: The membership view that the thread keeps up to date.
        swarm: Queries about the swarm.

    Raises:
        TypeError: An argument that hivemind's tracker does not have either.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        target_batch_size: int,
        *,
        client_mode: bool | None = None,
        heartbeat: float = 1.0,
        silence: float | None = None,
        straggler_timeout: float = STRAGGLER_TIMEOUT_S,
        quorum: bool = False,
        metadata_expiration: float = 60.0,
        performance_ema_alpha: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        start: bool,
        **hiveminds: Any,
    ) -> None:
        if unknown := set(hiveminds) - HIVEMINDS_ALONE:
            raise TypeError(f"no option of a progress tracker: {', '.join(sorted(unknown))}")
        self.dht, self.target_batch_size, self.quorum = dht, target_batch_size, quorum
        self.performance_ema = PerformanceEMA(alpha=performance_ema_alpha)
        client_mode = dht.client_mode if client_mode is None else client_mode
        silence = min(SILENCE_S, metadata_expiration) if silence is None else silence
        now = get_dht_time()
        version = int(now * 1000)  # larger than those of a former incarnation
        own = Heartbeat(
            dht.peer_id.to_bytes(), now, version, client_mode=client_mode, spread=version
        )
        self.view = MembershipView(own, silence, straggler_timeout=straggler_timeout)
        self._lock = self.view.lock
        self._service = HeartbeatService(
            dht,
            prefix,
            self.view,
            heartbeat=min(heartbeat, silence / 3),
            expiration=max(metadata_expiration, 2 * silence),
            on_change=self._view_changed,
            links=PeerLinks(f"{prefix}.heartbeat_link", not client_mode, bulk=False),
        )
        self._thread = LoopThread(self._serve, f"{type(self).__name__}({prefix})")
        self.swarm = ProgressView(self.view, target_batch_size, self._thread.ended)
        self._round_wait, self._batch = RoundWait(self.swarm), 0
        self._clock = clock
        self._batch_ended: float | None = None
        self._on_break: Callable[[], None] | None = None
        self._averagers: AveragerMembers | None = None
        self._announced_samples = 0
        if start:
            self.start()

    # -- the thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def _serve(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(CHECK_S, self._keep_checking, loop)
        await self._service.run(stop)

    def _keep_checking(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look for a break, now and again; the loop logs an error of a user's callback."""
        loop.call_later(CHECK_S, self._keep_checking, loop)
        self._round_wait.news_s = self._service.round_trip() / 2
        self.check_break()

    def check(self) -> None:
        """Raise if this peer has lost contact with the swarm for good.

        Raises:
            PeerError: The thread failed.
        """
        error = self._thread.error
        if error is not None:
            raise PeerError(f"lost contact with the swarm: {error!r}") from error

    def shutdown(self, timeout: float | None = None) -> None:
        """Say goodbye to the other peers and end the thread; calling it again does nothing."""
        if self._thread.is_alive():
            self.take_part(False)
            self._thread.stop(timeout)

    def _view_changed(self) -> None:
        """Wake waiting threads, and pass on the members; in the thread."""
        with self._lock:
            self._lock.notify_all()
        if self._averagers is not None:
            self._averagers.pass_on(self._members)

    def pass_on_peers(self) -> None:
        """Let the averagers know the peers before a step: the thread may be late."""
        if self._averagers is not None:
            self._averagers.pass_on(self._members)

    def _members(self) -> dict[str, Members]:
        with self._lock:
            lost, one_group = self.view.lost(), not self.swarm.several_groups
            return {
                kind: (self.view.members(kind, kind == "averaged", one_group), lost)
                for kind in KINDS
            }

    def follow(self, on_members: OnMembers, on_break: Callable[[], None] | None = None) -> None:
        """Pass on the members of the run, now and whenever they change.

        Args:
            on_members: Called with one of :data:`KINDS`, the members for it, and the ids of the
                lost peers; mostly in the thread.
            on_break: Called in the thread when this peer has stepped out of the rounds.
        """
        with self._lock:
            self._averagers, self._on_break = AveragerMembers(on_members), on_break
        self._thread.wait_until_ready()
        self._thread.call_soon(self._view_changed)

    # -- announcements -----------------------------------------------------------------------------

    def _announce(self, aloud: bool = True, **fields: Any) -> None:
        """Change this peer's state; send it now if ``aloud``, else with the next heartbeat.

        A peer that never had company keeps its threads and its averagers asleep. A newcomer
        receives everything, and the averagers learn of it at the next heartbeat.
        """
        with self._lock:
            self.view.announce(aloud, **fields)
            if aloud:
                self._announced_samples = self.view.own.counted_samples
            has_company = bool(self.view.known())
        if aloud and has_company:
            self._thread.call_soon(self._service.announce)
            self._thread.call_soon(self._view_changed)

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """Progress of this peer in hivemind's terms."""
        own = self.view.own
        return LocalTrainingProgress(
            peer_id=own.peer_id,
            epoch=own.round,
            samples_accumulated=own.samples,
            samples_per_second=own.samples_per_second,
            time=get_dht_time(),
            client_mode=own.client_mode,
        )

    @property
    def takes_part(self) -> bool:
        """Whether the swarm's rounds wait for this peer."""
        return self.view.own.takes_part

    def take_part(self, takes_part: bool) -> None:
        """Announce whether rounds have to wait for this peer from now on."""
        with self._lock:
            if takes_part != self.takes_part or self.view.own.away:
                self._announce(takes_part=takes_part, away=False)

    def set_untrained(self, untrained: bool) -> None:
        """Announce whether this peer lacks the state of the run that it joined."""
        self._announce(untrained=untrained)

    def end_batch(self) -> None:
        """Note the end of a batch. If no batch begins soon, this peer steps out of the rounds.

        The break after a batch may be a validation, a checkpoint, a slow loader or a callback; only
        its length counts.
        """
        with self._lock:
            if self._batch_ended is None:
                self._batch_ended = self._clock()

    def begin_batch(self) -> float | None:
        """Note the start of a batch.

        Returns:
            The length of the break before it [s], if this peer stepped out meanwhile and has to
            come back before the batch; otherwise None.
        """
        with self._lock:
            ended, self._batch_ended = self._batch_ended, None
            self.view.note_progress()
            if not self.view.own.away:
                return None
            return 0.0 if ended is None else self._clock() - ended

    def check_break(self) -> None:
        """Step out of the rounds if the present break is long.

        A peer that averages in the background stays: it is in the group of the other peers.
        """
        with self._lock:
            own = self.view.own
            ended = min(own.averaged, own.synchronised)
            is_long = self._batch_ended is not None and self._clock() - self._batch_ended > BREAK_S
            if not (own.takes_part and is_long and ended >= own.entered):
                return
            self._announce(takes_part=False, away=True)
        if self._on_break is not None:
            self._on_break()

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Note this peer's progress, and announce it when it matters to the other peers."""
        own = self.view.own
        extra = samples_accumulated - own.samples
        if extra > 0 and self._batch:
            self.performance_ema.update(task_size=extra)
        else:  # before the first batch, the peer was starting
            self.performance_ema.reset_timer()
        self._batch = max(extra, 0) or self._batch
        goes_on = local_epoch == own.round and extra >= 0
        news = (samples_accumulated, self._batch, self._announced_samples)
        aloud, promised = self._round_wait.news(*news) if goes_on else (True, 0)
        self._announce(
            aloud=aloud,
            round=local_epoch,
            samples=samples_accumulated,
            promised=promised,
            samples_per_second=float(self.performance_ema.samples_per_second),
        )

    def wait_for_last_batches(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait a little if this peer has done its share and the others end their last batches.

        Args:
            check: Called about every 0.1 s; an error that it raises ends the wait.
        """
        seconds = self._round_wait.seconds(self._batch)
        if not seconds:
            return
        if self.view.own.samples > self._announced_samples:  # the others may lack just these
            self._announce()
        with self.pause_updates():
            self._round_wait.wait(seconds, check)

    def enter(self, round_: int) -> None:
        """Announce that this peer has computed its part of a round and averages now.

        It goes out with the next message: the other peers wait for this one anyway. With a quorum,
        or if they lack samples of this peer, they have to know, and it goes out now.
        """
        lacking = self.swarm.share_of_lacking(self._announced_samples)
        self._announce(aloud=self.quorum or lacking > 0, entered=round_)

    def hurry(self, round_: int) -> None:
        """Ask all peers to begin a round at once, because this peer leaves."""
        self._announce(hurry=round_)

    def note_group(self, round_: int, peers: Iterable[bytes]) -> None:
        """Note the peers that were in the group of a round."""
        with self._lock:
            self.view.note_group(round_, peers, self.quorum)
        if self.quorum:
            self._thread.call_soon(self._view_changed)

    def has_ended(self, kind: str, round_: int, *, met: bool, aloud: bool = True) -> None:
        """Announce the end of an averaging.

        Args:
            kind: ``averaged`` for gradients, ``synchronised`` for parameters.
            round_: The round that it belongs to.
            met: Whether this peer was in a group, and did not give up or stay out.
            aloud: Announce it now. After a complete round all members know it already.
        """
        if kind == "averaged" and not met:
            self.swarm.note_unmet(round_)
        fields = [kind, f"met_{kind}"] if met else [kind]
        self._announce(aloud, **{f: max(round_, getattr(self.view.own, f)) for f in fields})

    def pause_updates(self) -> AbstractContextManager[None]:
        """Return a context whose time does not count for this peer's speed."""
        paused: AbstractContextManager[None] = self.performance_ema.pause()
        return paused

    def update_epoch(self, new_epoch: int, aloud: bool = True) -> int:
        """Go on to a round, with no samples yet."""
        self.performance_ema.reset_timer()
        self._announce(aloud, round=new_epoch, samples=0, promised=0)
        with self._lock:
            self._announced_samples = 0
        return new_epoch

    def jump_to(self, round_: int, samples: int = 0) -> None:
        """Go on to a round whose state was loaded.

        Args:
            round_: The round.
            samples: Accumulated samples that are kept.
        """
        self.performance_ema.reset_timer()
        reached: dict[str, Any] = dict.fromkeys(("round", *KINDS), round_)
        self._announce(**reached, samples=samples, promised=0)

    def skip_to(self, round_: int) -> None:
        """Go on to a round of other peers, without having committed the rounds between."""
        with self._lock:  # a loss in between would get a wrong date
            self.view.skip(round_ - self.view.own.round)
            self.jump_to(round_)

    # -- the swarm, for hivemind's optimizer and for callbacks -------------------------------------

    @property
    def global_epoch(self) -> int:
        """The last round that a peer of the swarm has finished."""
        return self.swarm.newest_round

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer may begin the next round now."""
        return self.swarm.is_round_due

    def wait_for_peers(self, peers: int, timeout: float) -> bool:
        """Take part, and wait until a number of peers do; see :class:`ProgressView`."""
        self.take_part(True)
        return self.swarm.wait_for_peers(peers, timeout)
