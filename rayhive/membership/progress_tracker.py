"""Progress of the swarm, in place of :class:`hivemind.optim.progress_tracker.ProgressTracker`.

It has what hivemind's optimizer uses of that class, and differs in this:

* peers tell each other directly (:mod:`rayhive.membership.heartbeat`); hivemind's look into the
  DHT now and then, so that a round waits for the next look;
* a peer that dies is noticed within seconds, not when its entry in the DHT expires;
* a peer announces itself before it has accumulated its first sample, and says when it no longer
  takes part, so rounds begin with everybody and wait for nobody;
* a round is due when the samples are there, never because an estimate says that they should
  be: hivemind's estimate once fired after one batch of a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hivemind.dht import DHT
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import PerformanceEMA, get_dht_time

from rayhive.errors import PeerError
from rayhive.membership.breaks import Breaks, watch
from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.member import Member
from rayhive.membership.progress_view import ProgressView
from rayhive.membership.view import Heartbeat, MembershipView

#: The two kinds of averaging, by the field that says how far a peer is with it.
KINDS = ("averaged", "synchronised")
#: A peer that was not heard of for so long counts as dead [s].
SILENCE_S = 4.0

#: A peer that computes and made no progress for so long is not waited for until it does [s].
STRAGGLER_TIMEOUT_S = 60.0

#: Options of hivemind's tracker that say when it looks into the DHT, and the like.
HIVEMINDS_ALONE = frozenset(
    {
        "min_refresh_period", "default_refresh_period", "max_refresh_period", "daemon",
        "expected_drift_peers", "expected_drift_rate", "private_key", "status_loglevel",
    }
)  # fmt: skip

OnMembers = Callable[[str, tuple[Member, ...], frozenset[bytes]], None]


class LiveProgressTracker(ProgressView, threading.Thread):
    """Tracks the progress of this peer and of the swarm.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        target_batch_size: Samples of a round, over the swarm.
        client_mode: Whether this peer cannot be called; default: as the DHT.
        heartbeat: Between two signs of life [s].
        silence: A peer that was not heard of for so long counts as dead [s]; default 4 s, or
            ``metadata_expiration`` if that is shorter.
        straggler_timeout: A peer that computes and made no progress for so long is not waited for
            until it does [s].
        metadata_expiration: How long an entry in the DHT is valid [s].
        performance_ema_alpha: Smoothing of samples per second.
        start: Start at once.
        hiveminds: Further arguments of hivemind's tracker, for which there is no use here.

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
        metadata_expiration: float = 60.0,
        performance_ema_alpha: float = 0.1,
        start: bool,
        **hiveminds: Any,
    ) -> None:
        if unknown := set(hiveminds) - HIVEMINDS_ALONE:
            raise TypeError(f"no option of a progress tracker: {', '.join(sorted(unknown))}")
        super().__init__(name=f"{type(self).__name__}({prefix})", daemon=True)
        self.dht, self.prefix, self.target_batch_size = dht, prefix, target_batch_size
        self.client_mode = dht.client_mode if client_mode is None else client_mode
        self.performance_ema = PerformanceEMA(alpha=performance_ema_alpha)
        silence = min(SILENCE_S, metadata_expiration) if silence is None else silence
        now = get_dht_time()
        own = Heartbeat(dht.peer_id.to_bytes(), now, int(now * 1000), client_mode=self.client_mode)
        self._view = MembershipView(own, silence, straggler_timeout=straggler_timeout)
        self._lock = self._view.lock
        self._service = HeartbeatService(
            dht,
            prefix,
            self._view,
            heartbeat=min(heartbeat, silence / 3),
            expiration=max(metadata_expiration, 2 * silence),
            on_change=self._view_changed,
        )
        self._breaks = Breaks()
        self._on_break: Callable[[], None] | None = None
        self._on_members: OnMembers | None = None
        self._told: dict[str, tuple[tuple[Member, ...], frozenset[bytes]]] = {}
        self._told_samples = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Event
        self._ready, self.ended = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        if start:
            self.start()

    # -- the thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`shutdown`."""
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    async def _serve(self) -> None:
        self._leaving, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._ready.set()
        looking = asyncio.create_task(watch(self._step_out_if_idle))
        try:
            await self._service.run(self._leaving)
        finally:
            looking.cancel()

    def check(self) -> None:
        """Raise if this peer has lost contact with the swarm for good.

        Raises:
            PeerError: What happened.
        """
        if self.error is not None:
            raise PeerError(f"lost contact with the swarm: {self.error!r}") from self.error

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function)

    def shutdown(self, timeout: float | None = None) -> None:
        """Say goodbye and end; calling it again does nothing."""
        if not self.is_alive():
            return
        self.take_part(False)
        self._ready.wait(timeout)
        self._call_soon(self._leaving.set)
        self.ended.wait(timeout)

    def _view_changed(self) -> None:
        """Wake up who waits, and tell the members if they have changed; in the thread."""
        with self._lock:
            self._lock.notify_all()
            follower, lost = self._on_members, self._view.lost()
            told = {
                kind: (self._view.members(kind, computes=kind == self.comes_first), lost)
                for kind in KINDS
            }
        if follower is None:
            return
        for kind in KINDS:
            if told[kind] != self._told.get(kind):
                self._told[kind] = told[kind]
                follower(kind, *told[kind])

    def follow(self, on_members: OnMembers, on_break: Callable[[], None] | None = None) -> None:
        """Have a function called with those who take part, now and whenever they change.

        Args:
            on_members: Gets one of :data:`KINDS`, the members for it, and the ids of those who are
                gone without a word, in the thread.
            on_break: Called in the thread when this peer has stepped out of the rounds.
        """
        with self._lock:
            self._on_members, self._on_break = on_members, on_break
        self._ready.wait()
        self._call_soon(self._told.clear)
        self._call_soon(self._view_changed)

    def _say(self, aloud: bool = True, **fields: Any) -> None:
        """Change what this peer says of itself, and tell it now if it is said aloud.

        A peer that never had company keeps its threads and its averagers asleep: who comes is told
        everything, and the averagers hear of it at the next heartbeat.
        """
        with self._lock:
            self._view.say(**fields)
            if aloud:
                self._told_samples = self._view.own.samples
            heard = bool(self._view.others())
        if aloud and heard:
            self._call_soon(self._service.tell)
            self._call_soon(self._view_changed)

    # -- what this peer says -------------------------------------------------------------------

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """How far this peer is."""
        own = self._view.own
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
        return self._view.own.takes_part

    def take_part(self, takes_part: bool) -> None:
        """Say whether rounds have to wait for this peer from now on."""
        with self._lock:
            if takes_part != self.takes_part or self._view.own.away:
                self._say(takes_part=takes_part, away=False)

    def end_batch(self) -> None:
        """Say that no batch is computed now: if that lasts, this peer steps out of the rounds."""
        with self._lock:
            self._breaks.begin()

    def begin_batch(self) -> float | None:
        """Say that a batch begins.

        Returns:
            For how long there was none [s], if this peer stepped out meanwhile: it has to come
            back before the batch.
        """
        with self._lock:
            seconds = self._breaks.end()
            self._view.note_progress()
            return seconds if self._view.own.away else None

    def _step_out_if_idle(self) -> None:
        """Let the others go on without this peer if it has computed nothing for too long.

        Not while it averages in the background: the others have it in their group.
        """
        with self._lock:
            own = self._view.own
            ended = min(getattr(own, kind) for kind in (self.comes_first, "synchronised"))
            if not (own.takes_part and self._breaks.is_long and ended >= own.entered):
                return
            self._say(takes_part=False, away=True)
        if self._on_break is not None:
            self._on_break()

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Say how far this peer is; the others hear of it when it matters to them.

        It matters once what they have not heard of is this peer's share of what the round still
        lacks: as long as no peer's is, the round cannot be due. Peers of equal speed tell each
        other once a round.
        """
        own = self._view.own
        extra = samples_accumulated - own.samples
        if extra > 0:
            self.performance_ema.update(task_size=extra)
        else:
            self.performance_ema.reset_timer()
        with self._lock:
            unheard = samples_accumulated - self._told_samples
            lacking = self.target_batch_size - (self._view.samples() - own.samples)
            lacking -= self._told_samples
            share = lacking / max(1, self._view.in_step())
        self._say(
            aloud=local_epoch != own.round or extra < 0 or (unheard > 0 and unheard >= share),
            round=local_epoch,
            samples=samples_accumulated,
            samples_per_second=float(self.performance_ema.samples_per_second),
        )

    def jump_to(self, round_: int, samples: int = 0) -> None:
        """Go on to a round that this peer has taken over from another one.

        Args:
            round_: The round.
            samples: What it has accumulated and keeps.
        """
        self.performance_ema.reset_timer()
        self._say(round=round_, averaged=round_, synchronised=round_, samples=samples)

    def enter(self, round_: int) -> None:
        """Say that this peer has computed its part of a round, and averages now.

        The others hear of it with the next message: they wait for it until it has come.
        """
        self._say(aloud=False, entered=round_)

    def skip_to(self, round_: int) -> None:
        """Go on to a round that others came to, and count those between as if done long ago."""
        with self._lock:  # a loss in between would be dated wrongly
            self._view.skip(round_ - self._view.own.round)
            self.jump_to(round_)

    def has_ended(self, kind: str, round_: int, *, met: bool, aloud: bool = True) -> None:
        """Say that this peer has an averaging behind it.

        Args:
            kind: ``averaged`` for gradients, ``synchronised`` for parameters.
            round_: The round that it belongs to.
            met: Whether it was in a group, and did not give up or keep out.
            aloud: Tell the others now. All who were in a complete group know it already.
        """
        fields = [kind, f"met_{kind}"] if met else [kind]
        self._say(aloud, **{f: max(round_, getattr(self._view.own, f)) for f in fields})

    def hurry(self, round_: int) -> None:
        """Ask everybody to begin a round with what there is: this peer has no time left."""
        self._say(hurry=round_)

    @contextlib.contextmanager
    def pause_updates(self) -> Iterator[None]:
        """Do not count the time in the body as time spent on samples."""
        with self.performance_ema.pause():
            yield

    def update_epoch(self, new_epoch: int, aloud: bool = True) -> int:
        """Go on to a round, with no samples yet."""
        self.performance_ema.reset_timer()
        self._say(aloud, round=new_epoch, samples=0)
        with self._lock:
            self._told_samples = 0
        return new_epoch
