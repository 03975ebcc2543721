"""The retention of a request's KV in DRAM, as the request's KV hints ask for it.

vLLM passes an envelope of KV hints with a request (`Request.kv_hints`). The action `retain` with
version 1 and the payload `{"seconds": N}` asks that the request's KV stays in DRAM for N seconds
after the request has ended. Actions of other types and versions are ignored, as is a payload that
cannot be read.

All full blocks of a request are retained, those of the answer too: the next turn of a conversation
begins with the prompt and the answer. Blocks that are still to be saved are retained when their
save has ended. The store limits how much is retained (`PinningArena.retain`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

logger = logging.getLogger("headrace.kvstore")

ACTION_TYPE, ACTION_VERSION, SECONDS = "retain", "1", "seconds"
"""Type and version of the action, and the field of its payload."""
MAX_RETENTION_S = 86_400.0
"""Longest retention; longer ones are cut to it."""
MAX_WAITING = 65_536
"""Maximum number of blocks that are still to be saved and then retained, about 10 MB; then the
oldest are dropped. That is a million tokens in blocks of 16."""

Retain = Callable[[Sequence[bytes], float, str], None]
"""(names of blocks, root first; until when; salt of the request) -> retains them; must not wait."""


class RequestRetention:
    """Retention of one engine's requests.

    Args:
        retain: retains the blocks of them that are stored.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, retain: Retain, clock: Callable[[], float] = time.monotonic) -> None:
        self._retain, self._clock = retain, clock
        self._waiting: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        self._has_warned = False

    def seconds(self, request: Any) -> float:
        """Return how long a request's KV is to be retained after its end; 0 if it has no hint.

        Args:
            request: vLLM's, in the scheduler.
        """
        hints, longest_s = getattr(request, "kv_hints", None), 0.0
        if hints is None:
            return 0.0
        try:
            actions = [(a.action_type, a.action_version, a.payload) for a in hints.actions]
        except (AttributeError, TypeError):  # vLLM checks envelopes that it decodes only
            self._warn(hints)
            return 0.0
        for action_type, version, payload in actions:
            if (action_type, version) != (ACTION_TYPE, ACTION_VERSION):
                continue
            seconds = retention_s(payload)
            if seconds is None:
                self._warn(payload)
            else:
                longest_s = max(longest_s, seconds)
        return longest_s

    def finish(
        self, names: Sequence[bytes], held: Iterable[int], seconds: float, salt: str
    ) -> None:
        """Retain the blocks of a request that has ended.

        Args:
            names: of its blocks, root first.
            held: positions of those that are still to be saved.
            salt: the request's.
        """
        until_s = self._clock() + seconds
        self._retain(names, until_s, salt)
        for name in (names[i] for i in held):
            before_s, _ = self._waiting.pop(name, (0.0, ""))
            self._waiting[name] = max(before_s, until_s), salt
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def saved(self, names: Iterable[bytes]) -> None:
        """Retain the blocks of a save that has ended, well or not, if their requests asked for
        it."""
        if not self._waiting:
            return
        due: dict[tuple[float, str], list[bytes]] = {}
        for name in names:
            wanted = self._waiting.pop(name, None)
            if wanted is not None:
                due.setdefault(wanted, []).append(name)
        for (until_s, salt), saved in due.items():
            self._retain(saved, until_s, salt)

    def _warn(self, payload: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "KV hints are ignored whose payload is not {'seconds': NUMBER}, NUMBER at least 0, "
                "such as %.100r; this is logged once",
                payload,
            )


def retention_s(payload: object) -> float | None:
    """Return the seconds of an action's payload, at most `MAX_RETENTION_S`; None if it has none."""
    seconds = payload.get(SECONDS) if isinstance(payload, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        return None
    return float(min(seconds, MAX_RETENTION_S))
