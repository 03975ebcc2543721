"""Requests that killed several replicas in a row: for a while, they are sent to no replica.

A request is identified by its tenant, its route and its body. It is allowed again after
`QUARANTINE_S`, since its replicas may have died by chance. Replicas that hang put no request here:
most of their requests only waited.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from headrace.gateway import errors

QUARANTINE_S = 600.0
Buffer = bytes | memoryview
MAX_REQUESTS = 1000
"""Maximum number of requests in quarantine; the oldest leave first."""


class _Outline(NamedTuple):
    """The parts of a request that are cheap to compare."""

    tenant: str | None
    target: str
    body_bytes: int


class Quarantine:
    """The quarantine of one event loop.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until_s: OrderedDict[tuple[_Outline, bytes], float] = OrderedDict()
        """End of the quarantine by outline and digest of the body; the next to leave is first."""
        self._outlines: dict[_Outline, int] = {}
        """Number of requests in quarantine by outline."""

    def __len__(self) -> int:
        self._expire()
        return len(self._until_s)

    def add(self, tenant: str | None, target: str, body: Buffer) -> None:
        """Put a request into quarantine, because it killed too many replicas."""
        outline = _Outline(tenant, target, len(body))
        key = outline, _digest(body)
        if key in self._until_s:
            del self._until_s[key]
        else:
            self._outlines[outline] = self._outlines.get(outline, 0) + 1
        self._until_s[key] = self._now() + QUARANTINE_S
        while len(self._until_s) > MAX_REQUESTS:
            self._remove_first()

    def check(self, tenant: str | None, target: str, body: Buffer) -> None:
        """Refuse a request that is in quarantine.

        Its body is hashed only if a request of the same tenant, route and length is in quarantine.

        Raises:
            ApiError: 422, this request is in quarantine.
        """
        if not self._until_s:
            return
        self._expire()
        outline = _Outline(tenant, target, len(body))
        if outline not in self._outlines:
            return
        until_s = self._until_s.get((outline, _digest(body)))
        if until_s is not None:
            raise errors.quarantined(until_s - self._now())

    def _expire(self) -> None:
        now_s = self._now()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._remove_first()

    def _remove_first(self) -> None:
        (outline, _), _ = self._until_s.popitem(last=False)
        self._outlines[outline] -= 1
        if not self._outlines[outline]:
            del self._outlines[outline]


def _digest(body: Buffer) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
