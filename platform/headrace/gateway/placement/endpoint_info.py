"""The address at which a replica publishes its reports and KV events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_kvstore.protocol.membership import MIN_SECRET_CHARACTERS

_MAX_ENDPOINT_CHARS = 256
_MAX_WINDOWS, _MAX_WINDOW_BLOCKS = 4, 1 << 20


@dataclass(frozen=True, slots=True)
class EndpointInfo:
    """The address of a replica's publisher.

    Attributes:
        events, replay: endpoints of its sockets.
        epoch: id of the replica's start; it changes with each start.
        token: secret that proves membership in the app.
        windows: of the engine's KV cache groups (`KvEventProcessor.add_source`).
    """

    events: str
    replay: str
    epoch: str
    token: str
    windows: tuple[int, ...] = ()

    @classmethod
    def of(cls, answer: Any) -> EndpointInfo | None:
        """Return the address from `endpoint` in a replica's answer to `headrace_replica`.

        Returns:
            The address; None if the replica has no publisher, or its address is malformed.
        """
        if not isinstance(answer, Mapping):
            return None
        parts = [answer.get(name) for name in ("events", "replay", "epoch", "token")]
        if not all(isinstance(part, str) and len(part) <= _MAX_ENDPOINT_CHARS for part in parts):
            return None
        windows = answer.get("windows", [])
        if not isinstance(windows, list) or len(windows) > _MAX_WINDOWS:
            return None
        if not all(type(each) is int and 0 <= each <= _MAX_WINDOW_BLOCKS for each in windows):
            return None
        info = cls(*parts)  # type: ignore[arg-type]
        info = replace(info, windows=tuple(windows))
        return info if len(info.token) >= MIN_SECRET_CHARACTERS else None
