"""Pace of a connection: how fast its bytes get to the other side."""

from __future__ import annotations

import socket
import struct
from ipaddress import ip_address

#: Place of the delivery rate in Linux's ``tcp_info`` [bytes/s]; kernels before 4.9 have none. It is
#: that of the last bytes that the connection was full of, or of later ones if they were faster.
_DELIVERY_RATE = struct.Struct("=160xQ")
#: Pace below which a connection is slow [bytes/s]. To code a body and to restore it costs some 4 ns
#: a byte of processor time, and shortens float32 by 16 % and 8-bit codes by 7 %.
SLOW = 16e6


class Pace:
    """Tells whether a connection is slow.

    Args:
        connection: A TCP connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._is_measured = hasattr(socket, "TCP_INFO") and not is_loopback(connection)

    def is_slow(self) -> bool:
        """Return whether the bytes of the connection get on slowly now.

        A connection over loopback is never slow, nor one of another system than Linux.
        """
        if not self._is_measured:
            return False
        info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DELIVERY_RATE.size)
        (rate,) = _DELIVERY_RATE.unpack(info.ljust(_DELIVERY_RATE.size, b"\0"))
        return bool(0 < rate < SLOW)


def is_loopback(connection: socket.socket) -> bool:
    """Return whether a connection does not leave this machine's loopback interface."""
    place = connection.getpeername() if connection.family != socket.AF_UNIX else ""
    return bool(place) and ip_address(place[0].partition("%")[0]).is_loopback
