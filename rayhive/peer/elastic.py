"""A peer of the baseline ``elastic``: torch's agent, and the way of its process to the actor.

The agent is torchrun's own (``torch.distributed.launcher.api.launch_agent``). It runs in the peer
process and starts the training process (:mod:`rayhive.peer.elastic_worker`) as often as necessary.
Events and commands pass through the peer process, which counts what the peer has computed so far.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError
from torch.distributed.launcher.api import launch_agent

from rayhive import events
from rayhive.baselines.collectives import listening_store
from rayhive.baselines.elastic import OWN_STORE, launch_config
from rayhive.peer.channel import Channel
from rayhive.peer.elastic_worker import Order, work
from rayhive.spec import commands
from rayhive.spec.replicate import PeerSpec

#: Timeout of the store that the first peer keeps where no supervisor does [s].
_STORE_S = 60.0
#: Longest wait for the last events of a training process that has ended [s].
_LAST_S = 5.0


def run_agent(channel: Channel, spec: PeerSpec, facts: dict[str, Any]) -> None:
    """Run torch's elastic agent until the replicate is over or the peer is to leave.

    A notice ends the agent with SIGTERM, as the manager of a cluster does.

    Args:
        channel: Destination of events and source of commands.
        spec: The peer.
        facts: Further fields of ``peer_ready``.
    """
    start = channel.wait_for(commands.Start)
    os.environ[OWN_STORE] = "1"
    store = None
    address = next(iter(start.initial_peers), None)
    if address is None:
        store, address = listening_store(spec.host, 1, _STORE_S)
    channel.emit(events.DHTReady(addresses=[address]))
    signal.signal(signal.SIGTERM, _stop)
    relay = WorkerRelay(channel)
    with tempfile.TemporaryDirectory(prefix="elastic-", ignore_cleanup_errors=True) as folder:
        order = Order(spec.model_dump_json(by_alias=True), relay.address, folder, facts)
        try:
            launch_agent(launch_config(spec, urlsplit(address).netloc, folder), work, [order])
        except SignalException:
            relay.await_last_events()
            if channel.has_failed:
                return
            if relay.history.finished:
                channel.wait_for(commands.Shutdown)
            else:
                say_goodbye(channel, relay.history)
        except RendezvousClosedError:
            if relay.history.training and not relay.history.finished:
                raise  # another agent has failed
            channel.wait_for(commands.Shutdown)  # it came when the others had ended
    del store


def say_goodbye(channel: Channel, history: WorkerHistory) -> None:
    """Report that the peer leaves; its rounds count until the others go back behind them."""
    left = events.Left(round=history.round, handed_over=0, lost=history.pending)
    channel.say_goodbye(left, history.computed, history.clock_s(time.monotonic()))


def _stop(number: int, _: FrameType | None) -> None:
    """End the agent, as torch's own handlers do as soon as they are installed."""
    raise SignalException(f"signal {number}", signal.Signals(number))


class WorkerHistory:
    """Reports of the training processes of one peer so far."""

    def __init__(self) -> None:
        self.training = self.finished = False
        self.round = self.computed = 0
        self._ready = False
        self._used = 0  # samples that entered a round or were lost
        self._rounds: dict[int, int] = {}
        self._clock = 0.0, 0.0
        self._round_ended_s = 0.0

    @property
    def pending(self) -> int:
        """Samples that are in no round."""
        return self.computed - self._used

    def clock_s(self, now: float) -> float:
        """Return the training clock at a time [s of ``time.monotonic``]."""
        clock, at = self._clock
        return clock + now - at if self.training else 0.0

    def take(self, event: events.Event, now: float) -> bool:
        """Note an event; return whether the supervisor gets it: a peer becomes ready once."""
        match event:
            case events.PeerReady():
                if self._ready:
                    return False
                self._ready = True
            case events.TrainingStarted():
                self.training, self.round, self._clock = True, event.round or 0, (0.0, now)
            case events.Round():
                self.round = event.round
                self.computed = self._used = event.computed or self.computed
                self._rounds[event.round] = event.samples
            case events.Transition():
                self._clock, self._round_ended_s = (event.clock_s or 0.0, now), event.clock_s or 0.0
            case events.Evaluation():  # the clock stood still
                self._clock = event.clock_s or 0.0, now
            case events.Progress():
                self.computed = event.computed
            case events.Checkpoint():
                if event.ok and event.round is not None:
                    kept = [n for n in self._rounds if n > event.round]
                    self._rounds = {number: self._rounds[number] for number in kept}
            case events.RolledBack():
                self.round, self._used = event.round, self.computed
                kept = [n for n in self._rounds if n <= event.round]
                self._rounds = {number: self._rounds[number] for number in kept}
            case events.PeerFinished():
                self.finished = True
        return True

    def resume(self, ended_s: float | None, now: float) -> commands.Resume:
        """Return the command for the next training process.

        Args:
            ended_s: When the last one ended; None without one [s of ``time.monotonic``].
            now: The present time [s of ``time.monotonic``].
        """
        return commands.Resume(
            training=self.training,
            round=self.round,
            computed=self.computed,
            pending=self.pending,
            rounds=tuple(self._rounds.items()),
            clock_s=self.clock_s(now),
            round_ended_s=self._round_ended_s,
            sent_s=now,
            ended_s=ended_s,
        )


class WorkerRelay:
    """Passes the events of the training process on to the actor, and commands to the process.

    Args:
        channel: Channel of the peer.

    Attributes:
        address: Name of the socket to which training processes connect.
        history: What they have reported.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self.history = channel, WorkerHistory()
        self._lock = threading.Lock()
        self._worker: socket.socket | None = None
        self._train = self._shutdown = self._stopping = False
        self._has_joined = False  # the present training process: until then it meets the others
        self._idle = threading.Event()
        self._idle.set()
        self._ended_s: float | None = None
        self.address = f"\0rayhive-{os.getpid()}-{secrets.token_hex(8)}"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.address)
        self._server.listen(1)
        channel.listen(self._hear)
        threading.Thread(target=self._serve, name="rayhive-relay", daemon=True).start()

    def await_last_events(self) -> None:
        """Wait until the events of a training process that has ended are passed on."""
        self._idle.wait(_LAST_S)

    def _serve(self) -> None:
        """Serve one training process after the other."""
        while True:
            worker, _ = self._server.accept()
            with self._lock:
                self._worker = worker
                self._idle.clear()
                self._send(self.history.resume(self._ended_s, time.monotonic()))
                if self._train:
                    self._send(commands.Train())
                if self._channel.stop_reason is not None:
                    self._end()
            with suppress(ConnectionError):
                self._read(worker)
            with self._lock:
                self._worker, self._ended_s = None, time.monotonic()
                self._has_joined = False
                worker.close()
                self._idle.set()
                if self._channel.stop_reason is not None or self.history.finished:
                    self._end()

    def _read(self, worker: socket.socket) -> None:
        """Pass on the events of a training process until its end."""
        with worker.makefile(encoding="utf-8") as lines:
            for line in lines:
                try:
                    event = events.load_event(line)
                except ValueError:  # half a line of a process that was killed
                    continue
                with self._lock:
                    self._has_joined = True
                    if self.history.take(event, time.monotonic()):
                        self._channel.emit(event)
                    if isinstance(event, events.PeerFailed):
                        self._channel.has_failed = True
                        self._stop_agent()

    def _hear(self, command: commands.Command) -> None:
        """Take a command of the actor."""
        with self._lock:
            match command:
                case commands.Leave() | commands.GiveNotice():
                    self._stop_agent()
                case commands.Train():
                    self._train = True
                    self._send(command)
                case commands.Stop():
                    if self._has_joined:
                        self._send(command)
                    else:  # the others may have ended
                        self._end()
                case commands.Shutdown():
                    self._shutdown = True
                    self._send(command)
                    if self._worker is None:
                        self._stop_agent()

    def _send(self, command: commands.Command) -> None:
        if self._worker is not None:
            with suppress(OSError):  # it ended
                self._worker.sendall(command.model_dump_json().encode() + b"\n")

    def _end(self) -> None:
        """End a peer that is asked to stop, or has finished, and has no process that trains."""
        history = self.history
        if history.training and not history.finished:
            end = events.PeerFinished(
                reason=self._channel.stop_reason or "stop",
                round=history.round,
                samples=history.computed,
                pending=history.pending,
                clock_s=history.clock_s(time.monotonic()),
            )
            history.take(end, time.monotonic())
            self._channel.emit(end)
        if not self._shutdown:
            self._stop_agent()

    def _stop_agent(self) -> None:
        """End the agent, which runs in the main thread."""
        if not self._stopping:
            self._stopping = True
            os.kill(os.getpid(), signal.SIGTERM)
