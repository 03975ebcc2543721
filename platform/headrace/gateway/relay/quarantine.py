"""Requests that killed one replica after the other: for a while nobody is asked them again.

A request is known by its body and route. One whose replicas died by chance is let in again after
`QUARANTINE_S`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from headrace.gateway import errors

QUARANTINE_S = 600.0
MOST = 1000
"""Requests remembered; the oldest are forgotten first."""


class Quarantine:
    """Of one event loop.

    Args:
        now: seconds of a clock that only goes forward.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, target: str, body: bytes) -> None:
        """A request has killed as many replicas as it may."""
        self._until_s[_fingerprint(target, body)] = self._now() + QUARANTINE_S
        while len(self._until_s) > MOST:
            self._until_s.popitem(last=False)

    def check(self, target: str, body: bytes) -> None:
        """Costs nothing while nobody is in quarantine.

        Raises:
            ApiError: 422, this request is.
        """
        if not self._until_s:
            return
        left_s = self._until_s.get(_fingerprint(target, body), 0.0) - self._now()
        if left_s > 0:
            raise errors.quarantined(left_s)


def _fingerprint(target: str, body: bytes) -> bytes:
    return hashlib.blake2b(target.encode() + b"\0" + body, digest_size=16).digest()
