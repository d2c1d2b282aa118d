"""Messages between the memberships of two peers: calls and their answers have the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hivemind.utils import MSGPackSerializer

from rayhive.membership.view import Heartbeat


@dataclass(frozen=True)
class Letter:
    """One message.

    Attributes:
        sender: Id of the sender.
        idle: Time since the sender's last progress [s].
        log_id: Id of the sender's log of news.
        start: Position of that log after which the message has the news.
        end: Position up to which it has them.
        have_log: Id of the receiver's log that the sender knows.
        have: Position of the receiver's log up to which the sender has the news.
        have_version: Version of the receiver's announcement that the sender has.
        records: Announcements, each with its age [s] and idle time [s].
        bare: Ids of peers whose addresses the receiver has; they are left out.
    """

    sender: bytes
    idle: float
    log_id: int
    start: int
    end: int
    have_log: int
    have: int
    have_version: int
    records: Sequence[tuple[Heartbeat, float, float]] = ()
    bare: frozenset[bytes] = frozenset()

    def pack(self) -> bytes:
        """Return the message for the wire."""
        *header, records, bare = vars(self).values()
        lines = []
        for heartbeat, age, idle in records:
            fields = heartbeat.pack()
            if heartbeat.peer_id in bare:
                fields[-1] = ()
            lines.append([fields, age, idle])
        packed: bytes = MSGPackSerializer.dumps([*header, lines])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Letter:
        """Return the message with the bytes of :meth:`pack`.

        Raises:
            TypeError: It has too few or too many fields.
            ValueError: It is no message.
        """
        *header, records = MSGPackSerializer.loads(packed)
        header.append([(Heartbeat.unpack(fields), age, idle) for fields, age, idle in records])
        return cls(*header)
