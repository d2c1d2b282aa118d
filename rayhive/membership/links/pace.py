"""Pace of a connection: its round trip, and how fast its bytes get to the other side."""

from __future__ import annotations

import math
import socket
import struct
from ipaddress import ip_address
from typing import ClassVar

#: Places in Linux's ``tcp_info``: the shortest round trip [us], with all bits set if it is unknown;
#: and the delivery rate [bytes/s], that of the last bytes that the connection was full of, or of
#: later ones if they were faster. Kernels before 4.9 have no delivery rate.
_MIN_RTT, _DELIVERY_RATE = struct.Struct("=148xI"), struct.Struct("=160xQ")
_UNKNOWN = 0xFFFFFFFF
#: Pace below which a connection is slow [bytes/s]. To code a body and to restore it costs some 4 ns
#: a byte of processor time, and shortens float32 by 16 % and 8-bit codes by 7 %.
SLOW = 16e6
#: Pace that is a full sign of a slow link [bytes/s]; a faster one is a part of a sign.
SURELY_SLOW = SLOW / 8
#: Number of bodies over which signs are averaged, and the average from which a link is slow. A
#: queue on the way, such as the bucket of a shaper, takes in bursts at any rate, so few bodies meet
#: the rate of a slow link. A busy processor delays bodies on a fast link, but rarely as much.
_BODIES, _ENOUGH = 32, 0.02


class Pace:
    """Measures a connection, where the system is Linux.

    Args:
        connection: A TCP connection.

    Attributes:
        is_local: Whether the connection does not leave this machine's loopback interface.
    """

    #: Average of the signs, by the own address of connections: they share a link as a rule.
    _signs: ClassVar[dict[str, float]] = {}

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._address, place = str(connection.getsockname()[:1]), connection.getpeername()
        self.is_local = bool(place) and ip_address(place[0].partition("%")[0]).is_loopback

    def round_trip(self) -> float:
        """Return the shortest round trip so far [s]; infinity if it is unknown."""
        if not hasattr(socket, "TCP_INFO"):
            return math.inf
        trip = self._reported(_MIN_RTT, b"\xff")
        return math.inf if trip == _UNKNOWN else trip * 1e-6

    def is_slow(self) -> bool:
        """Return whether bodies got on slowly of late, also on other connections of the address.

        It is asked once for each body. A connection over loopback is never slow, nor one of another
        system than Linux.
        """
        if self.is_local or not hasattr(socket, "TCP_INFO"):
            return False
        rate, average = self._reported(_DELIVERY_RATE, b"\0"), self._signs.get(self._address, 0.0)
        sign = min(1.0, SURELY_SLOW / rate) if 0 < rate < SLOW else 0.0
        average = self._signs[self._address] = average + (sign - average) / _BODIES
        return average >= _ENOUGH

    def _reported(self, place: struct.Struct, unknown: bytes) -> int:
        """Return a number of the kernel's; an older one leaves it out, as if of unknown bytes."""
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, place.size)
        return int(place.unpack(info.ljust(place.size, unknown))[0])
