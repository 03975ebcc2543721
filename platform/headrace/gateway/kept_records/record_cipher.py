"""Encryption of records: AES-256-GCM under a key for each tenant.

The keys follow from the app's secret by HKDF-SHA256, so a copied file or bucket reveals nothing
without the secret, and one tenant's key opens no other tenant's record. A record is bound to its
tenant, its thread and its name: one that was flipped, cut or put in another's place does not open.
A whole record that was put back in its own place is not noticed.

Tenants are named in the store by tags, which follow from the secret, too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache, partial

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VERSION = b"\x01"
_NONCE_BYTES = 12
OVERHEAD_BYTES = len(VERSION) + _NONCE_BYTES + 16
"""Bytes by which a sealed record is longer."""
MAX_TENANTS = 1024
"""Maximum number of tenants whose keys are held; making one again takes some 30 microseconds."""
GATEWAYS = "\0gateways"
"""Name under which gateways keep their own records; no tenant can have it."""


class DamagedRecordError(Exception):
    """The error of a record that does not open: it was changed, cut, or put in another's place.

    Args:
        thread, name: the record.
    """

    def __init__(self, thread: str, name: str) -> None:
        super().__init__(f"the record {thread}/{name} is damaged")
        self.thread, self.name = thread, name


@dataclass(frozen=True, slots=True)
class _Keys:
    tag: str
    aead: AESGCM


class RecordCipher:
    """The cipher of an app's records. Thread-safe.

    Args:
        secret: the app's, at least 16 random bytes.

    Raises:
        ValueError: the secret is shorter.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError("the app's secret must have at least 16 bytes")
        self._of = lru_cache(MAX_TENANTS)(partial(_keys_of, secret))

    def tag(self, tenant: str | None) -> str:
        """Return the name of a tenant in the store: 32 hexadecimal digits."""
        return self._of(tenant).tag

    def seal(self, tenant: str | None, thread: str, name: str, data: bytes) -> bytes:
        """Return a record encrypted."""
        keys = self._of(tenant)
        nonce = os.urandom(_NONCE_BYTES)
        return VERSION + nonce + keys.aead.encrypt(nonce, data, _place(keys.tag, thread, name))

    def open(self, tenant: str | None, thread: str, name: str, sealed: bytes) -> bytes:
        """Return a record decrypted.

        Raises:
            DamagedRecordError: it is not the record that was sealed for this place.
        """
        keys = self._of(tenant)
        nonce = sealed[len(VERSION) : len(VERSION) + _NONCE_BYTES]
        try:
            if not sealed.startswith(VERSION) or len(sealed) < OVERHEAD_BYTES:
                raise InvalidTag
            rest = memoryview(sealed)[len(VERSION) + _NONCE_BYTES :]
            return keys.aead.decrypt(nonce, rest, _place(keys.tag, thread, name))
        except InvalidTag:
            raise DamagedRecordError(thread, name) from None


def _keys_of(secret: bytes, tenant: str | None) -> _Keys:
    who = b"" if tenant is None else b"=" + tenant.encode()
    tag = _derived(secret, b"tag" + who, 16).hex()
    return _Keys(tag, AESGCM(_derived(secret, b"key" + who, 32)))


def _place(tag: str, thread: str, name: str) -> bytes:
    return f"{tag}/{thread}/{name}".encode()


def _derived(secret: bytes, purpose: bytes, size: int) -> bytes:
    info = b"headrace conversation state: " + purpose
    return HKDF(SHA256(), size, salt=None, info=info).derive(secret)
