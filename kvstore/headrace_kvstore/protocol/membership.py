"""Proof that a peer belongs to the app: CurveZMQ keys, derived from a secret that all members have.

Every member derives the same pair of keys. A server admits only clients that have it. The line is
encrypted and signed. A client that is no member learns that a port is open, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

MIN_SECRET_CHARACTERS = 16
"""Minimum length of a secret: an outsider who recorded a handshake can try secrets offline."""
HANDSHAKE_MS = 5000
"""Time after which a client that has not proved itself is disconnected."""
_DOMAIN = "headrace"


class Membership:
    """The keys of a member. The secret itself is never sent."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._private = z85.encode(self.key(b"members"))
        self._public: bytes = zmq.curve_public(self._private)

    def key(self, purpose: bytes) -> bytes:
        """Return 32 bytes that only members can derive, different for each purpose."""
        return hashlib.blake2b(self._secret, digest_size=32, person=purpose).digest()

    def guard(self, *sockets: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Let only members in, until the authenticator is stopped; call it before `bind`, once for
        all sockets of a context."""
        guard = ThreadAuthenticator(sockets[0].context)
        guard.configure_curve_callback(_DOMAIN, credentials_provider=self)
        guard.start()
        for socket in sockets:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
            socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return guard

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client has the members' key; the authenticator calls it."""
        return hmac.compare_digest(key, self._public)

    def enter(self, socket: zmq.Socket[Any]) -> None:
        """Make a client's socket prove itself, and talk only to a member; call it before
        `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
