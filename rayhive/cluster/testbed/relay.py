"""Relay that delays and drops Ethernet frames, for kernels without netem.

The script runs in the switch's network namespace, one process for each node, and needs only the
standard library. It creates two interfaces, one to be bridged with the node's end of the link and
one with the switch. It reads frames from each interface, holds them for the delay and writes them
to the other. Frames keep their order, also when the delay changes.

A client that connects to the socket sends one line of JSON, ``{"delay_ms": …, "loss": …}`` or
``{}``, and receives the settings and counters.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TAP_NO_PI = 0x0002 | 0x1000
_LARGEST = 65536
#: Largest number of frames held in one direction. A link with 100 Mbit/s and 500 ms needs 700
#: frames of 9000 bytes.
_MOST = 50_000
_BATCH = 64


class Direction:
    """Frames in transit from one interface to the other.

    Args:
        source: File descriptor that frames are read from.
        sink: File descriptor that frames are written to.
    """

    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.held: collections.deque[tuple[float, bytes]] = collections.deque()
        self.passed = self.lost = self.overflowed = 0

    def take(self, delay_s: float, loss: float, chance: random.Random) -> None:
        """Read the frames that have arrived.

        Args:
            delay_s: Time to hold them [s].
            loss: Share of the frames to drop.
            chance: Source of the random numbers.
        """
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                frame = os.read(self.source, _LARGEST)
                if loss and chance.random() < loss:
                    self.lost += 1
                elif len(self.held) >= _MOST:
                    self.overflowed += 1
                else:
                    self.held.append((time.monotonic() + delay_s, frame))

    def give(self) -> float | None:
        """Write the frames that are due; return the time until the next one is due [s]."""
        held = self.held
        while held:
            wait = held[0][0] - time.monotonic()
            if wait > 0:
                return wait
            frame = held.popleft()[1]
            try:
                os.write(self.sink, frame)
                self.passed += 1
            except OSError:  # the other end is down, and the frame is lost
                self.overflowed += 1
        return None

    def counters(self) -> dict[str, int]:
        """Return the numbers of frames by their fate."""
        return {"passed": self.passed, "lost": self.lost, "overflowed": self.overflowed}


def tap(name: str) -> int:
    """Create an Ethernet interface that lives as long as this process; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return descriptor


def serve(
    server: socket.socket, up: Direction, down: Direction, delay_ms: float, loss: float
) -> None:
    """Relay frames forever.

    Args:
        server: Listening socket for clients.
        up: Frames from the node to the switch.
        down: Frames from the switch to the node.
        delay_ms: Delay in each direction [ms].
        loss: Share of the frames to drop, in each direction.
    """
    chance = random.Random()
    sources = [up.source, down.source, server.fileno()]
    while True:
        waits = [wait for wait in (up.give(), down.give()) if wait is not None]
        ready, _, _ = select.select(sources, [], [], min(waits, default=None))
        for direction in (up, down):
            if direction.source in ready:
                direction.take(delay_ms / 1e3, loss, chance)
        if server.fileno() in ready:
            with contextlib.suppress(OSError, ValueError):
                delay_ms, loss = _answer(server, up, down, delay_ms, loss)


def _answer(
    server: socket.socket, up: Direction, down: Direction, delay_ms: float, loss: float
) -> tuple[float, float]:
    client, _ = server.accept()
    with client:
        client.settimeout(0.2)  # frames wait meanwhile
        asked = json.loads(client.recv(4096))
        delay_ms = float(asked.get("delay_ms", delay_ms))
        loss = float(asked.get("loss", loss))
        answer = {"delay_ms": delay_ms, "loss": loss}
        counters = {"up": up.counters(), "down": down.counters()}
        client.sendall(json.dumps({**answer, **counters}).encode())
    return delay_ms, loss


def main(path: str, node_side: str, switch_side: str, delay_ms: str, loss: str, group: str) -> None:
    """Create the interfaces, go to the background, and relay.

    Args:
        path: Path of the socket.
        node_side: Name of the interface for the node's end.
        switch_side: Name of the interface for the switch.
        delay_ms: Delay in each direction [ms].
        loss: Share of the frames to drop, in each direction.
        group: ``cgroup.procs`` file of the control group to move to; empty to stay.
    """
    node, switch = tap(node_side), tap(switch_side)
    with contextlib.suppress(OSError):
        os.unlink(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(path)
    server.listen()
    if os.fork():
        os._exit(0)  # the caller continues: interfaces and socket exist
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if group:  # the delay must not depend on the node's CPU quota
        with contextlib.suppress(OSError), open(group, "w", encoding="ascii") as file:
            file.write("0")
    # The relay needs little CPU time, but without delay even on a busy machine.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    serve(server, Direction(node, switch), Direction(switch, node), float(delay_ms), float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
