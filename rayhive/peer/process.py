"""Main function of a peer process, from its spec to its exit code.

The process has a session of its own, logs to a file, and is connected to its actor by one socket
(:mod:`rayhive.peer.channel`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import socket
import sys
import traceback
from importlib import metadata
from pathlib import Path
from typing import Any

from rayhive.events import DHTReady, Left, Spawned
from rayhive.files import in_turn
from rayhive.peer.channel import Channel
from rayhive.spec.commands import Start
from rayhive.spec.replicate import PeerSpec

_PR_SET_PDEATHSIG = 1
_PACKAGES = ("rayhive", "torch", "lightning", "hivemind", "ray", "optuna", "numpy")


def run_peer(connection: socket.socket, spec: PeerSpec) -> int:
    """Train one peer until its replicate is over.

    Args:
        connection: The socket to the actor.
        spec: The peer.

    Returns:
        The exit code: 0, or 1 after a ``peer_failed`` event.
    """
    # heartbeats come from a thread that must not wait for the training loop
    sys.setswitchinterval(0.0005)
    os.register_at_fork(after_in_child=_die_with_parent)
    channel = Channel(connection, spec.name)
    channel.emit(Spawned(pid=os.getpid()))
    _enter(spec.directory)
    try:
        _train(channel, spec)
    except BaseException as error:
        if channel.notice is not None:  # the peer was to end anyway
            traceback.print_exc()
            if not channel.has_left:  # it had not begun to train
                channel.say_goodbye(Left(round=0, handed_over=0, lost=0))
            return 0
        channel.fail(error)
        traceback.print_exc()
        return 1
    return 0


def _enter(directory: str | None) -> None:
    """Change to the study's working directory, if this node has it.

    A relative path in a study (a module, data) then means the same file for the driver and for
    every peer, wherever Ray starts its workers.
    """
    if directory is None:
        return
    try:
        os.chdir(directory)
    except OSError as error:
        text = f"the study's working directory is not on this node; working in {os.getcwd()}"
        print(f"{text}: {error}", file=sys.stderr, flush=True)


def prepare_one_at_a_time(module: Any) -> None:
    """Run ``prepare_data`` of the peers that share a working directory one after the other.

    Each peer is rank 0 of its own trainer, so Lightning runs the hook in all of them.
    """
    prepare = module.prepare_data

    @functools.wraps(prepare)
    def one_at_a_time() -> None:
        with in_turn(Path()):
            prepare()

    module.prepare_data = one_at_a_time


def _die_with_parent() -> None:
    """Make the kernel kill hivemind's forks with the trainer; left alone, they join groups.

    They ignore SIGTERM: on that signal the trainer hands over its samples, and needs them.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _train(channel: Channel, spec: PeerSpec) -> None:
    if spec.baseline is None:
        _train_in_swarm(channel, spec)
    else:
        from rayhive.peer.baseline import train_baseline

        train_baseline(channel, spec, _facts())


def _train_in_swarm(channel: Channel, spec: PeerSpec) -> None:
    from rayhive.peer.from_spec import PeerFit
    from rayhive.peer.replicate_monitor import ReplicateMonitor
    from rayhive.strategy.dht import meet, start_on_host

    fit = PeerFit(spec)
    prepare_one_at_a_time(fit.module)
    monitor = ReplicateMonitor(spec, fit, channel, _facts())
    # All peers start their daemons at the same time, before the addresses of the first are known.
    dht = start_on_host(spec.host)
    try:
        addresses = [str(address) for address in dht.get_visible_maddrs()]
        channel.emit(DHTReady(peer_id=str(dht.peer_id), addresses=addresses))
        meet(dht, channel.wait_for(Start).initial_peers)
        strategy = fit.strategy(dht=dht, on_event=monitor.on_event)
        fit.run(fit.trainer(strategy, monitor))
    finally:
        dht.shutdown()


def _facts() -> dict[str, Any]:
    return {
        "versions": {
            name: next((found.version for found in metadata.distributions(name=name)), None)
            for name in _PACKAGES
        },
    }


def leave(code: int) -> None:
    """End the process without the exit handlers that the forkserver registered."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
