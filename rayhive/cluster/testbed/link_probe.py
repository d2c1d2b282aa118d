"""Measurement of the rate, delay and loss of a link from both of its ends.

A socket stays in the namespace in which it was created. So one thread holds both ends of a path,
and needs neither a second process nor a second clock. The probes are UDP packets, which show the
behaviour of the link itself: no protocol repeats the lost ones.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import statistics
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rayhive.cluster.testbed import namespaces
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.faults.node_tools import LinkMeasurement
from rayhive.spec import Link

_HEADER = struct.Struct("!Id")
#: Headers of UDP, IP and Ethernet on the wire [bytes].
_HEADERS = 28 + 14
#: Size of a probe on the wire [bytes].
_PROBE = 64
_BUFFER = 8 * 2**20
# Of <asm-generic/socket.h>.
_FORCE_SEND_BUFFER, _FORCE_RECEIVE_BUFFER, _TIMESTAMP = 32, 33, 35
_TIMESPEC = struct.Struct("@ll")
#: A stream is faster than the link by this factor; on an unlimited link it has this rate.
_OFFER, _FREE_MBIT = 1.3, 2000.0
_WARM_UP_S, _STREAM_S, _PACKETS = 0.15, 0.5, 400
_FEWEST = 100
#: Largest burst that a shaper lets through [bytes].
_BURST = 20_000
_PINGS, _PING_GAP_S = 21, 0.004
#: Packets that are sent at once, before arrived ones are taken.
_BATCH = 32
#: Probes for loss: expected number of lost ones, number without loss, largest rate [Mbit/s] and
#: longest time [s].
_LOST, _CLEAN, _PROBE_MBIT, _LOSS_S = 200, 1000, 6.0, 8.0


class Path:
    """Two ends in different namespaces with a path between them; see :func:`path`.

    Args:
        near: Socket at the first end.
        far: Socket at the second end.
    """

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self._sockets = (near, far)

    def reach(
        self, count: int = 10, patience_s: float = 1.0, gap_s: float = 0.002
    ) -> tuple[int, int]:
        """Return the number of packets, of ``count``, that arrive in each direction.

        Args:
            count: Number of packets in each direction.
            patience_s: Longest wait for the last packets [s].
            gap_s: Shortest time between two packets [s].
        """
        out, back = self._exchange((0, 1), count, gap_s, patience_s)
        return len(out), len(back)

    def delays(self, patience_s: float) -> tuple[list[float], list[float]]:
        """Return the delays of packets in each direction [ms].

        The kernel stamps the arrival of each packet, so a delay of this thread does not matter.

        Args:
            patience_s: Longest wait for the last packets [s].
        """
        out, back = self._exchange((0, 1), _PINGS, _PING_GAP_S, patience_s)
        return [1e3 * (got.at - got.sent) for got in out], [1e3 * (g.at - g.sent) for g in back]

    def rate(self, side: int, link: Link, size: int, patience_s: float) -> float:
        """Return the arrival rate of a stream that is sent faster than the link [Mbit/s].

        Args:
            side: 0 to send from the first end, 1 from the second.
            link: Expected shape of the link.
            size: Largest packet [bytes].
            patience_s: Longest delay of a packet [s].
        """
        asked = link.rate_mbit
        offer = (_FREE_MBIT if asked is None else _OFFER * asked / (1 - link.loss)) * 1e6 / 8
        # On a slow link, many small packets give a better estimate than a few large ones.
        size = max(200, min(size + 14, int(offer * _STREAM_S / _PACKETS)))
        warm_up = max(_WARM_UP_S, _BURST / ((1 - 1 / _OFFER) * offer))
        count = int((warm_up + max(_STREAM_S, _FEWEST * size / offer)) * offer / size)
        arrived = self._exchange((side,), count, size / offer, patience_s, size)
        return _steady(arrived[side], warm_up)

    def _exchange(
        self, sides: Sequence[int], count: int, gap_s: float, patience_s: float, size: int = _PROBE
    ) -> tuple[list[_Arrival], list[_Arrival]]:
        """Send packets, and return those that arrived from the first and from the second end.

        Args:
            sides: Ends that send.
            count: Number of packets of each of them.
            gap_s: Shortest time between two packets of an end [s].
            patience_s: Longest wait for the last packets [s].
            size: Size of a packet on the wire [bytes].
        """
        for each in self._sockets:
            while _arrival(each) is not None:
                pass  # of an earlier exchange
        arrived: tuple[list[_Arrival], list[_Arrival]] = ([], [])
        begin, sent = time.monotonic(), 0
        deadline = math.inf
        while time.monotonic() < deadline and any(len(arrived[side]) < count for side in sides):
            if sent < count:
                due = min(count, sent + _BATCH, 1 + int((time.monotonic() - begin) / gap_s))
                for number in range(sent, due):
                    for side in sides:
                        self._send(side, number, size)
                sent = due
                if sent == count:
                    deadline = time.monotonic() + patience_s
            for ready in select.select(self._sockets, [], [], min(gap_s, 0.01))[0]:
                taken = arrived[1 - self._sockets.index(ready)]
                while (got := _arrival(ready)) is not None:
                    taken.append(got)
        return arrived

    def _send(self, side: int, number: int, size: int) -> None:
        here, there = self._sockets[side], self._sockets[1 - side].getsockname()
        packet = _HEADER.pack(number & 0xFFFFFFFF, time.time()).ljust(size - _HEADERS)
        # A packet that cannot be sent (full queue, no route) counts as lost.
        with contextlib.suppress(OSError):
            here.sendto(packet, there)


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
    for option in (_FORCE_RECEIVE_BUFFER, _FORCE_SEND_BUFFER):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return made


class _Arrival(NamedTuple):
    """Packet that arrived: times of sending and of arrival in the kernel [s], size [bytes]."""

    sent: float
    at: float
    size: int


def _arrival(here: socket.socket) -> _Arrival | None:
    try:
        packet, notes, _, _ = here.recvmsg(65536, 64)
    except BlockingIOError:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(notes[0][2][: _TIMESPEC.size])
    sent = float(_HEADER.unpack_from(packet)[1])
    return _Arrival(sent, seconds + nanoseconds * 1e-9, len(packet) + _HEADERS)


def _steady(times: list[_Arrival], warm_up: float) -> float:
    """Return the rate of arrivals after the first burst of a shaper [Mbit/s]."""
    late = [each for each in times if each.at >= times[0].at + warm_up]
    if len(late) < 3 or late[-1].at <= late[0].at:
        return 0.0
    return sum(each.size for each in late[1:]) * 8e-6 / (late[-1].at - late[0].at)


def measure_link(
    state: TestbedState, node: NodeState, link: Link, what: Collection[str] = ()
) -> LinkMeasurement:
    """Measure the link between a node and the switch.

    It takes one to ten seconds; slow links and small losses take longest. Other traffic on the link
    lowers the measured rate.

    Args:
        state: The testbed.
        node: The node.
        link: Expected shape; it determines the amount of traffic.
        what: Properties to measure, of ``rate``, ``rtt`` and ``loss``; all if it is empty.
    """
    what = what or ("rate", "rtt", "loss")
    patience = 3 * link.delay_ms / 1e3 + 0.3
    found: dict[str, float | int | None] = {}
    with path(state, node) as ends:
        if not any(ends.reach(10, patience)):
            return LinkMeasurement(loss_up=1.0, loss_down=1.0, probes=10)
        if "rtt" in what:
            both = [each for each in ends.delays(patience) if each]
            if len(both) == 2:
                rtt = sum(map(statistics.median, both))
                found["rtt_ms"], found["jitter_ms"] = rtt, rtt - sum(map(min, both))
        if "loss" in what:
            pace = min(_PROBE_MBIT, (link.rate_mbit or _PROBE_MBIT) / 2)
            most = int(_LOSS_S * pace * 1e6 / 8 / _PROBE)
            count = min(most, round(_LOST / link.loss) if link.loss else _CLEAN)
            arrived = ends.reach(count, patience, _PROBE * 8 / (pace * 1e6))
            found["loss_up"], found["loss_down"] = (1 - each / count for each in arrived)
            found["probes"] = count
        if "rate" in what:
            # A rate of 0 means that the machine was stalled: measure once more.
            up, down = (
                ends.rate(side, link, state.mtu, patience)
                or ends.rate(side, link, state.mtu, patience)
                for side in (0, 1)
            )
            # A relay drops packets after the shaper of the upward direction.
            found["rate_up_mbit"] = up if state.netem else up / (1 - link.loss)
            found["rate_down_mbit"] = down
    return LinkMeasurement.model_validate(found)


@contextlib.contextmanager
def path(state: TestbedState, node: NodeState, to: NodeState | None = None) -> Iterator[Path]:
    """Open the path from a node to the switch, or through it to another node."""
    near = node.namespace, node.data_address
    far = (state.switch, state.data_gateway) if to is None else (to.namespace, to.data_address)
    with (
        namespaces.inside(near[0], lambda: _bound(near[1])) as first,
        namespaces.inside(far[0], lambda: _bound(far[1])) as second,
    ):
        yield Path(first, second)
