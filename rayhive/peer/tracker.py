"""Progress of the swarm, in place of :class:`hivemind.optim.progress_tracker.ProgressTracker`.

It has what hivemind's optimizer uses of that class, and differs in this:

* peers tell each other directly (:mod:`rayhive.peer.presence`); hivemind's look into the DHT now
  and then, so that a round waits for the next look;
* a peer that dies is noticed within seconds, not when its entry in the DHT expires;
* a peer announces itself before it has accumulated its first sample, and says when it no longer
  takes part, so rounds begin with everybody and wait for nobody;
* a round is due when the samples are there, never because an estimate says that they should
  be: hivemind's estimate once fired after one batch of a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hivemind.dht import DHT
from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress
from hivemind.utils import PerformanceEMA, get_dht_time

from rayhive.compression.rendezvous import Member
from rayhive.errors import PeerError
from rayhive.peer.census import Census, Presence, Reunion
from rayhive.peer.presence import PresenceService

#: The two kinds of averaging, by the field that says how far a peer is with it.
KINDS = ("averaged", "synchronised")
#: A peer that was not heard of for so long counts as dead [s].
SILENCE_S = 4.0

#: Options of hivemind's tracker that say when it looks into the DHT, and the like.
HIVEMINDS_ALONE = frozenset(
    {
        "min_refresh_period", "default_refresh_period", "max_refresh_period", "daemon",
        "expected_drift_peers", "expected_drift_rate", "private_key", "status_loglevel",
    }
)  # fmt: skip

OnMembers = Callable[[str, tuple[Member, ...], frozenset[bytes]], None]


class LiveProgressTracker(threading.Thread):
    """Tracks the progress of this peer and of the swarm.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        target_batch_size: Samples of a round, over the swarm.
        client_mode: Whether this peer cannot be called; default: as the DHT.
        heartbeat: Between two signs of life [s].
        silence: A peer that was not heard of for so long counts as dead [s]; default 4 s, or
            ``metadata_expiration`` if that is shorter.
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
        own = Presence(dht.peer_id.to_bytes(), now, int(now * 1000), client_mode=self.client_mode)
        self._census = Census(own, silence)
        self._lock = self._census.lock
        self._service = PresenceService(
            dht,
            prefix,
            self._census,
            heartbeat=min(heartbeat, silence / 3),
            expiration=max(metadata_expiration, 2 * silence),
            on_change=self._census_changed,
        )
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
        await self._service.run(self._leaving)

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

    def _census_changed(self) -> None:
        """Wake up who waits, and tell the members if they have changed; in the thread."""
        with self._lock:
            self._lock.notify_all()
            follower, lost = self._on_members, self._census.lost()
            told = {kind: (self._census.members(kind), lost) for kind in KINDS}
        if follower is None:
            return
        for kind in KINDS:
            if told[kind] != self._told.get(kind):
                self._told[kind] = told[kind]
                follower(kind, *told[kind])

    def follow(self, on_members: OnMembers) -> None:
        """Have a function called with those who take part, now and whenever they change.

        Args:
            on_members: Gets one of :data:`KINDS`, the members for it, and the ids of those who are
                gone without a word, in the thread.
        """
        with self._lock:
            self._on_members = on_members
        self._ready.wait()
        self._call_soon(self._told.clear)
        self._call_soon(self._census_changed)

    def _say(self, aloud: bool = True, **fields: Any) -> None:
        """Change what this peer says of itself, and tell it now if it is said aloud.

        A peer that never had company keeps its threads and its averagers asleep: who comes is told
        everything, and the averagers hear of it at the next heartbeat.
        """
        with self._lock:
            own = self._census.own
            self._census.own = dataclasses.replace(own, version=own.version + 1, **fields)
            if aloud:
                self._told_samples = self._census.own.samples
            heard = bool(self._census.others())
        if aloud and heard:
            self._call_soon(self._service.tell)
            self._call_soon(self._census_changed)

    # -- what this peer says -------------------------------------------------------------------

    @property
    def local_progress(self) -> LocalTrainingProgress:
        """How far this peer is."""
        own = self._census.own
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
        return self._census.own.takes_part

    def take_part(self, takes_part: bool) -> None:
        """Say whether rounds have to wait for this peer from now on."""
        if takes_part != self.takes_part:
            self._say(takes_part=takes_part)

    def report_local_progress(
        self, local_epoch: int, samples_accumulated: int, update_global_samples: bool = True
    ) -> None:
        """Say how far this peer is; the others hear of it when it matters to them.

        It matters once what they have not heard of is this peer's share of what the round still
        lacks: as long as no peer's is, the round cannot be due. Peers of equal speed tell each
        other once a round.
        """
        own = self._census.own
        extra = samples_accumulated - own.samples
        if extra > 0:
            self.performance_ema.update(task_size=extra)
        else:
            self.performance_ema.reset_timer()
        with self._lock:
            unheard = samples_accumulated - self._told_samples
            lacking = self.target_batch_size - (self._census.samples() - own.samples)
            lacking -= self._told_samples
            share = lacking / max(1, self._census.in_step())
        self._say(
            aloud=local_epoch != own.round or extra < 0 or (unheard > 0 and unheard >= share),
            round=local_epoch,
            samples=samples_accumulated,
            samples_per_second=float(self.performance_ema.samples_per_second),
        )

    def jump_to(self, round_: int) -> None:
        """Go on to a round that this peer has taken over from another one."""
        self.performance_ema.reset_timer()
        self._say(round=round_, averaged=round_, synchronised=round_, samples=0)

    def skip_to(self, round_: int) -> None:
        """Go on to a round that others came to, and count those between as if done long ago."""
        with self._lock:  # a loss in between would be dated wrongly
            self._census.skip(round_ - self._census.own.round)
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
        self._say(aloud, **{f: max(round_, getattr(self._census.own, f)) for f in fields})

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

    # -- what it knows of the swarm ------------------------------------------------------------

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        with self._lock:
            return self._census.in_step()

    @property
    def global_epoch(self) -> int:
        """The last round that anybody has finished."""
        with self._lock:
            return self._census.newest_round()

    @property
    def global_progress(self) -> GlobalTrainingProgress:
        """How far the swarm is."""
        with self._lock:
            everybody = self._census.taking_part()
            rate = sum(p.samples_per_second for p in everybody) or self.performance_ema.eps
            samples = self._census.samples()
            lacking = max(0, self.target_batch_size - samples)
            return GlobalTrainingProgress(
                epoch=self._census.newest_round(),
                samples_accumulated=samples,
                target_batch_size=self.target_batch_size,
                num_peers=self._census.in_step(),
                num_clients=sum(p.client_mode for p in everybody),
                eta_next_epoch=get_dht_time() + lacking / rate,
                next_fetch_time=get_dht_time(),
            )

    def take_reunion(self) -> Reunion | None:
        """Return who came back that was lost, since the last call."""
        with self._lock:
            return self._census.take_reunion()

    def any_here(self, peers: Iterable[bytes]) -> bool:
        """Return whether any of these is known and alive."""
        with self._lock:
            return any(self._census.is_here(peer) for peer in peers)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether this peer may go on to the next round now."""
        with self._lock:
            behind = self._census.newest_round() > self._census.own.round
            due = self._census.samples() >= self.target_batch_size
            return behind or due or self._census.is_in_a_hurry()

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
            while len(self._census.taking_part()) < peers:
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set():
                    return False
                self._lock.wait(min(left, 1.0))
        return True
