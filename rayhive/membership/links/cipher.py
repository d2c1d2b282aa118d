"""Encryption of a link: AES-256-GCM records under keys that only the two peers know.

The keys are derived (HKDF) from a random secret of 256 bits that one peer gave the other over the
daemon's encrypted channel, and from a random number of each side, so that no two connections share
a key. Each direction has a key of its own, and counts its records: a record that is changed,
repeated, left out or moved does not decrypt, and the link ends. The daemon's channel has forward
secrecy, and therefore the link has it: the peers' private keys do not decrypt a recorded link.

TLS would give the same between peers that share a secret already. Python's ``ssl`` encrypts at most
16 KiB a call, and the calls take several times as long as the encryption.
"""

from __future__ import annotations

import itertools

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

#: Bytes by which a record is longer than its content.
TAG = 16
_KEY_BYTES, _NONCE_BYTES = 32, 12


class Tampered(ConnectionError):
    """A record was not encrypted by the other side, or not as the next one."""


class Cipher:
    """One direction of a link.

    Args:
        key: The key; no other cipher may use it.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher, self._records = AESGCM(key), itertools.count()

    def _nonce(self) -> bytes:
        return next(self._records).to_bytes(_NONCE_BYTES, "big")

    def seal(self, content: memoryview, record: memoryview) -> None:
        """Encrypt content as the next record.

        Args:
            content: The content.
            record: Where the record goes, longer by :data:`TAG`.
        """
        self._cipher.encrypt_into(self._nonce(), content, None, record)

    def open(self, record: memoryview) -> memoryview:
        """Return the content of the next record, in new memory.

        Raises:
            Tampered: It is not the next record of the other side.
        """
        content = np.empty(record.nbytes - TAG, np.uint8).data
        try:
            self._cipher.decrypt_into(self._nonce(), record, None, content)
        except InvalidTag:
            raise Tampered("a record of the other side was changed") from None
        return content


def cipher(secret: bytes, salt: bytes, role: bytes) -> Cipher:
    """Return the cipher of one direction.

    Args:
        secret: Secret of both sides.
        salt: Random numbers of both sides.
        role: Name of the sending side.
    """
    derived = HKDF(hashes.SHA256(), _KEY_BYTES, salt, role).derive(secret)
    return Cipher(derived)
