"""What a link really does, seen from both of its ends.

A socket stays in the namespace in which it was made, so one thread holds both ends of a path and
needs neither a second process nor a second clock. Packets are UDP's: they are lost where they are
lost and show the link, not what a protocol makes of it.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import time
from dataclasses import dataclass, field

from rayhive.cluster.testbed import namespaces
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.config import Link, Model

_HEADER = struct.Struct("!Id")
_UDP_IP = 28
#: What a probe is on the wire, with the headers of UDP, IP and Ethernet [bytes].
_PROBE = 64
_BUFFER = 8 * 2**20
_FORCE_SEND_BUFFER, _FORCE_RECEIVE_BUFFER = 32, 33  # of <asm-generic/socket.h>
#: A stream is offered faster than the link by this factor, or at this rate where none is asked.
_OFFER, _FREE_MBIT = 1.3, 2000.0
_WARM_UP_S, _STREAM_S, _PACKETS = 0.15, 0.5, 60
#: What shapers let through at once, at most [bytes].
_BURST = 20_000
_PINGS, _PING_GAP_S = 21, 0.004
#: Probes for loss: so many of them shall be lost, at most so fast and for so long.
_LOST, _CLEAN, _PROBE_MBIT, _LOSS_S = 200, 1000, 6.0, 8.0


class Measured(Model):
    """What was seen of a path, ``up`` from its first end, ``down`` towards it.

    Attributes:
        rate_up_mbit: Rate [Mbit/s], the headers included.
        rate_down_mbit: The same in the other direction.
        rtt_ms: Median round-trip time [ms]; None if nothing came back.
        jitter_ms: From the quickest to the median [ms].
        loss_up: Share of the packets that did not arrive.
        loss_down: The same in the other direction.
        probes: Packets, in each direction, that the loss was counted on.
    """

    rate_up_mbit: float | None = None
    rate_down_mbit: float | None = None
    rtt_ms: float | None = None
    jitter_ms: float | None = None
    loss_up: float | None = None
    loss_down: float | None = None
    probes: int = 0


@dataclass(frozen=True)
class End:
    """One end of a path: an address in a namespace."""

    namespace: str
    address: str


@dataclass
class _Sent:
    sent: int = 0
    arrived: int = 0
    times: list[tuple[float, int]] = field(default_factory=list)


class Path:
    """Two sockets with a path between them. Use it in a ``with`` block.

    Args:
        near: The first end.
        far: The second end.
    """

    def __init__(self, near: End, far: End) -> None:
        self._ends = (near, far)
        self._sockets: tuple[socket.socket, ...] = ()

    def __enter__(self) -> Path:
        self._sockets = tuple(
            namespaces.inside(end.namespace, lambda end=end: _bound(end.address))  # type: ignore[misc]
            for end in self._ends
        )
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._sockets:
            each.close()

    def reach(self, count: int = 10, patience_s: float = 1.0) -> tuple[int, int]:
        """Return how many of ``count`` packets arrive in each direction."""
        sent = [_Sent(), _Sent()]
        for number in range(count):
            for side in (0, 1):
                self._send(side, number, _PROBE)
                sent[side].sent += 1
            self._collect(sent, 0.002)
        deadline = time.monotonic() + patience_s
        while min(each.arrived for each in sent) < count and time.monotonic() < deadline:
            self._collect(sent, 0.02)
        return sent[0].arrived, sent[1].arrived

    def round_trip(self, patience_s: float) -> tuple[float | None, float | None]:
        """Return the median of round-trip times and its distance to the quickest [ms]."""
        far = self._sockets[1]
        self._drain()
        times: list[float] = []
        sent, next_ping = 0, time.monotonic()
        deadline = next_ping + _PINGS * _PING_GAP_S + patience_s
        while len(times) < _PINGS and (now := time.monotonic()) < deadline:
            if sent < _PINGS and now >= next_ping:
                self._send(0, sent, _PROBE)
                sent, next_ping = sent + 1, now + _PING_GAP_S
            wait = (next_ping if sent < _PINGS else deadline) - time.monotonic()
            for ready in select.select(self._sockets, [], [], max(0.0, wait))[0]:
                packet = ready.recv(_BUFFER)
                if ready is far:
                    self._write(1, packet)
                else:
                    times.append(1e3 * (time.monotonic() - _HEADER.unpack_from(packet)[1]))
        if not times:
            return None, None
        return statistics.median(times), statistics.median(times) - min(times)

    def loss(self, count: int, rate_mbit: float, patience_s: float) -> tuple[float, float]:
        """Return the share of ``count`` packets that is lost in each direction.

        Args:
            count: Packets in each direction.
            rate_mbit: At most so fast [Mbit/s].
            patience_s: How long the last ones may take [s].
        """
        self._drain()
        sent = [_Sent(), _Sent()]
        gap = _PROBE * 8 / (rate_mbit * 1e6)
        begin = time.monotonic()
        while sent[0].sent < count:
            due = min(count, 1 + int((time.monotonic() - begin) / gap))
            for number in range(sent[0].sent, due):
                for side in (0, 1):
                    self._send(side, number, _PROBE)
                    sent[side].sent += 1
                if number % 32 == 31:
                    self._collect(sent, 0.0)
            self._collect(sent, gap)
        deadline = time.monotonic() + patience_s
        while min(each.arrived for each in sent) < count and time.monotonic() < deadline:
            self._collect(sent, 0.02)
        up, down = (1 - each.arrived / each.sent for each in sent)
        return up, down

    def rate(self, side: int, asked_mbit: float | None, size: int, patience_s: float) -> float:
        """Return what a stream that is faster than the link arrives with [Mbit/s].

        Args:
            side: 0 to send from the first end, 1 from the second.
            asked_mbit: What the link is expected to do; None if it is not shaped.
            size: Largest packet [bytes].
            patience_s: How long packets take [s].
        """
        self._drain()
        offer = (_FREE_MBIT if asked_mbit is None else _OFFER * asked_mbit) * 1e6 / 8
        # Of a slow link many small packets tell more than a few large ones.
        size = max(200, min(size, int(offer * _STREAM_S / _PACKETS)))
        seen, listener = _Sent(), self._sockets[1 - side]
        warm_up = max(_WARM_UP_S, _BURST / ((1 - 1 / _OFFER) * offer))
        begin = time.monotonic()
        end = begin + warm_up + max(_STREAM_S, _PACKETS * size / offer)
        while (now := time.monotonic()) < end + patience_s:
            allowed = int((now - begin) * offer / size) if now < end else seen.sent
            for _ in range(min(32, allowed - seen.sent)):
                self._send(side, seen.sent, size)
                seen.sent += 1
            ready = select.select([listener], [], [], min(size / offer, 0.01))[0]
            while ready and (got := _receive(listener)) is not None:
                seen.times.append((time.monotonic(), got + 14 + _UDP_IP))
        return _steady(seen.times, warm_up)

    def _send(self, side: int, number: int, size: int) -> None:
        stamp = _HEADER.pack(number & 0xFFFFFFFF, time.monotonic())
        self._write(side, stamp.ljust(size - 14 - _UDP_IP if size == _PROBE else size - _UDP_IP))

    def _write(self, side: int, packet: bytes) -> None:
        here = self._sockets[side]
        try:
            here.sendto(packet, self._sockets[1 - side].getsockname())
        except OSError:  # a full queue or no way there: lost like any other
            return

    def _collect(self, sent: list[_Sent], wait: float) -> None:
        for ready in select.select(self._sockets, [], [], wait)[0]:
            side = 1 - self._sockets.index(ready)
            while _receive(ready) is not None:
                sent[side].arrived += 1

    def _drain(self) -> None:
        for each in self._sockets:
            while _receive(each) is not None:
                pass


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.setblocking(False)
    for option in (_FORCE_RECEIVE_BUFFER, _FORCE_SEND_BUFFER):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return made


def _receive(here: socket.socket) -> int | None:
    try:
        return len(here.recv(65536))
    except BlockingIOError:
        return None


def _steady(times: list[tuple[float, int]], warm_up: float) -> float:
    """Return the rate of arrivals after what a shaper lets through at once [Mbit/s]."""
    late = [(at, size) for at, size in times if at >= times[0][0] + warm_up]
    if len(late) < 3 or late[-1][0] <= late[0][0]:
        return 0.0
    return sum(size for _, size in late[1:]) * 8e-6 / (late[-1][0] - late[0][0])


def measure_link(state: TestbedState, node: NodeState, link: Link) -> Measured:
    """Measure a node's link against the switch: rate, round-trip time and loss.

    It takes one to ten seconds: slow links and small losses take longest. What else uses the link
    takes its share.

    Args:
        state: The testbed.
        node: The node.
        link: What it is expected to be; decides how much is sent.
    """
    patience = 3 * link.delay_ms / 1e3 + 0.3
    with path(state, node) as ends:
        if not any(ends.reach(10, patience)):
            return Measured(loss_up=1.0, loss_down=1.0, probes=10)
        rtt, jitter = ends.round_trip(patience)
        pace = min(_PROBE_MBIT, (link.rate_mbit or _PROBE_MBIT) / 2)
        most = int(_LOSS_S * pace * 1e6 / 8 / _PROBE)
        count = min(most, round(_LOST / link.loss) if link.loss else _CLEAN)
        up, down = ends.loss(count, pace, patience)
        rates = [ends.rate(side, link.rate_mbit, state.mtu, patience) for side in (0, 1)]
        # A stream shows what the shaper lets pass less what is lost behind or before it.
        return Measured(
            rate_up_mbit=rates[0] / (1 - up) if up < 1 else 0.0,
            rate_down_mbit=rates[1],
            rtt_ms=rtt,
            jitter_ms=jitter,
            loss_up=up,
            loss_down=down,
            probes=count,
        )


def path(state: TestbedState, node: NodeState, to: NodeState | None = None) -> Path:
    """Return the path from a node to the switch, or through it to another node."""
    near = End(node.namespace, node.data_address)
    if to is None:
        return Path(near, End(state.switch, state.data_gateway))
    return Path(near, End(to.namespace, to.data_address))
