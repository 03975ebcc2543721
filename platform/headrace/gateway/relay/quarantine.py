"""Requests that killed one replica after the other: for a while nobody is asked them again.

A request is known by its tenant, its route and its body. One whose replicas died by chance is let
in again after `QUARANTINE_S`. Replicas that hang put no request here: most of theirs only waited.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from headrace.gateway import errors

QUARANTINE_S = 600.0
MAX_REQUESTS = 1000
"""Requests remembered; the oldest are forgotten first."""


class _Outline(NamedTuple):
    """The parts of a request that cost nothing to compare."""

    tenant: str | None
    target: str
    body_bytes: int


class Quarantine:
    """The quarantine of one event loop.

    Args:
        now: seconds of a clock that only goes forward.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._until_s: OrderedDict[tuple[_Outline, bytes], float] = OrderedDict()
        """By outline and digest of the body; the first to leave first."""
        self._outlines: dict[_Outline, int] = {}
        """How many of these have each outline."""

    def __len__(self) -> int:
        self._expire()
        return len(self._until_s)

    def add(self, tenant: str | None, target: str, body: bytes) -> None:
        """Put a request in that has killed as many replicas as it may."""
        outline = _Outline(tenant, target, len(body))
        key = outline, _digest(body)
        if key in self._until_s:
            del self._until_s[key]
        else:
            self._outlines[outline] = self._outlines.get(outline, 0) + 1
        self._until_s[key] = self._now() + QUARANTINE_S
        while len(self._until_s) > MAX_REQUESTS:
            self._remove_first()

    def check(self, tenant: str | None, target: str, body: bytes) -> None:
        """Let a request pass that is not here. A body is hashed only where one of the same tenant,
        route and length is here.

        Raises:
            ApiError: 422, this request is.
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


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
