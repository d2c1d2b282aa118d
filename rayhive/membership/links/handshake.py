"""Start of a link: one-time secrets, and proofs that both sides know the same one.

A peer invites another one through the network daemon, which authenticates both and encrypts the
invitation. It holds addresses, and a secret that opens one connection. Both sides of the connection
prove that they know the secret and derive the keys of the link from it, see
:mod:`rayhive.membership.links.cipher`. On a trusted network the connection may be plain: the proofs
still tell the peers apart, but the data that follow are neither hidden nor protected.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayhive.membership.links.cipher import Cipher, cipher
from rayhive.membership.links.wire import prepare

#: How long an invitation is valid [s].
INVITED_S = 30.0
#: Longest handshake [s].
HANDSHAKE_S = 5.0
_KEY, _NONCE, _PROOF = 16, 32, 32
_PLAIN, _ENCRYPTED = b"\0", b"\1"
_DIALS, _ACCEPTS = b"rayhive link 3: dials", b"rayhive link 3: accepts"


class NotProven(ConnectionError):
    """The other side does not know the secret, or wants no encryption where it is required."""


@dataclass(frozen=True)
class Invitation:
    """All that a peer needs to connect to another one, once.

    Attributes:
        addresses: Hosts and ports at which the inviting peer listens.
        key: Name of the secret.
        secret: Opens one connection.
        plain: Whether the connection may do without encryption.
    """

    addresses: tuple[tuple[str, int], ...]
    key: bytes
    secret: bytes
    plain: bool

    def fields(self) -> dict[str, Any]:
        """Return the invitation as fields of a message."""
        return dict(vars(self))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Invitation:
        """Return the invitation from its fields."""
        addresses = tuple((str(host), int(port)) for host, port in fields["addresses"])
        return cls(addresses, fields["key"], fields["secret"], fields["plain"])


@dataclass(frozen=True)
class Opened:
    """Connection after its handshake.

    Attributes:
        connection: The socket, which does not block.
        seal: Cipher of outgoing records; None for a plain connection.
        open: Cipher of incoming records; None for a plain connection.
    """

    connection: socket.socket
    seal: Cipher | None
    open: Cipher | None


class Invitations:
    """Secrets of the peers that this one has invited; each of them opens one connection.

    Args:
        plain: Whether connections may do without encryption.
    """

    def __init__(self, plain: bool) -> None:
        self._plain = plain
        self._open: dict[bytes, tuple[bytes, bytes]] = {}

    def invite(self, guest: bytes, addresses: tuple[tuple[str, int], ...]) -> Invitation:
        """Return an invitation for a peer; one that it did not use is no longer valid."""
        self._open = {key: found for key, found in self._open.items() if found[0] != guest}
        key, secret = secrets.token_bytes(_KEY), secrets.token_bytes(_PROOF)
        self._open[key] = (guest, secret)
        asyncio.get_running_loop().call_later(INVITED_S, lambda: self._open.pop(key, None))
        return Invitation(addresses, key, secret, self._plain)

    async def accept(self, connection: socket.socket) -> tuple[Opened, bytes]:
        """Finish the handshake of a connection that arrived; return it with its guest.

        Raises:
            NotProven: The other side does not know a secret that is still valid.
            OSError: The connection broke.
        """
        loop = asyncio.get_running_loop()
        prepare(connection)
        hello = await _receive(connection, _KEY + 1 + _NONCE + _PROOF)
        key, mode = hello[:_KEY], hello[_KEY : _KEY + 1]
        nonce, proof = hello[_KEY + 1 : -_PROOF], hello[-_PROOF:]
        guest, secret = self._open.pop(key, (b"", b""))
        if not guest or not hmac.compare_digest(proof, _prove(secret, _DIALS, mode, nonce)):
            raise NotProven("the other side was not invited")
        if mode != _ENCRYPTED and not self._plain:
            raise NotProven("the other side does not encrypt")
        own = secrets.token_bytes(_NONCE)
        await loop.sock_sendall(connection, own + _prove(secret, _ACCEPTS, nonce, own))
        if mode == _PLAIN:
            return Opened(connection, None, None), guest
        salt = nonce + own
        seal, opens = cipher(secret, salt, _ACCEPTS), cipher(secret, salt, _DIALS)
        return Opened(connection, seal, opens), guest


async def connect(invitation: Invitation, address: tuple[str, int], plain: bool) -> Opened:
    """Connect to one address of an invitation, and finish the handshake.

    Args:
        invitation: The invitation.
        address: The address.
        plain: Whether to do without encryption if the other side agrees.

    Raises:
        NotProven: Another process listens there.
        OSError: There is no connection.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare(connection)
        await loop.sock_connect(connection, address)
        mode = _PLAIN if plain and invitation.plain else _ENCRYPTED
        secret, own = invitation.secret, secrets.token_bytes(_NONCE)
        proof = _prove(secret, _DIALS, mode, own)
        await loop.sock_sendall(connection, invitation.key + mode + own + proof)
        answer = await _receive(connection, _NONCE + _PROOF)
        nonce, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _prove(secret, _ACCEPTS, own, nonce)):
            raise NotProven("the listener did not invite this peer")
    except BaseException:
        connection.close()
        raise
    if mode == _PLAIN:
        return Opened(connection, None, None)
    salt = own + nonce
    return Opened(connection, cipher(secret, salt, _DIALS), cipher(secret, salt, _ACCEPTS))


def _prove(secret: bytes, role: bytes, *shown: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(shown), "sha256")


async def _receive(connection: socket.socket, size: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        data = await loop.sock_recv(connection, size - len(received))
        if not data:
            raise ConnectionResetError("closed during the handshake")
        received += data
    return received
