"""Relay that delays and drops Ethernet frames, for kernels without netem.

The script runs in the switch's network namespace, one process for each node, and needs only the
standard library. It creates two interfaces, one to be bridged with the node's end of the link and
one with the switch. It reads frames from each interface, holds them for the delay and writes them
to the other. Frames keep their order, also when the delay changes.

The settings are in a JSON file with ``delay_ms`` and ``loss``, which is read again after a SIGHUP.
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
                if not (loss and chance.random() < loss) and len(self.held) < _MOST:
                    self.held.append((time.monotonic() + delay_s, frame))

    def give(self) -> float | None:
        """Write the frames that are due; return the time until the next one is due [s]."""
        held = self.held
        while held:
            wait = held[0][0] - time.monotonic()
            if wait > 0:
                return wait
            frame = held.popleft()[1]
            with contextlib.suppress(OSError):  # the other end is down, and the frame is lost
                os.write(self.sink, frame)
        return None


def tap(name: str) -> int:
    """Create an Ethernet interface that lives as long as this process; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP_NO_PI))
    return descriptor


def serve(path: str, node: int, switch: int) -> None:
    """Relay frames forever.

    Args:
        path: File with the settings, read now and after each SIGHUP.
        node: Descriptor of the interface for the node's end.
        switch: Descriptor of the interface for the switch.
    """
    chance, settings = random.Random(), dict[str, float]()
    up, down = Direction(node, switch), Direction(switch, node)

    def read(*_: object) -> None:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            settings.update(json.load(file))

    signal.signal(signal.SIGHUP, read)
    read()
    while True:
        waits = [wait for wait in (up.give(), down.give()) if wait is not None]
        ready, _, _ = select.select([node, switch], [], [], min(waits, default=None))
        for direction in (up, down):
            if direction.source in ready:
                direction.take(settings["delay_ms"] / 1e3, settings["loss"], chance)


def main(path: str, node_side: str, switch_side: str, group: str) -> None:
    """Create the interfaces, go to the background, and relay.

    Args:
        path: File with the settings.
        node_side: Name of the interface for the node's end.
        switch_side: Name of the interface for the switch.
        group: ``cgroup.procs`` file of the control group to move to; empty to stay.
    """
    node, switch = tap(node_side), tap(switch_side)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the settings are read
    if os.fork():
        os._exit(0)  # the caller continues: the interfaces exist
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
    serve(path, node, switch)


if __name__ == "__main__":
    main(*sys.argv[1:])
