"""The seconds for which a request asks that its prompt's KV is retained, from each API's fields.

OpenAI's APIs have `prompt_cache_retention`. Anthropic's has `cache_control`, which marks a break
point: the prompt up to there. Here the longest time of all marks counts for the whole prompt:
agents mark the end of their last message, so that nothing follows the mark. vLLM ignores both
fields. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import msgspec

from headrace_decode.apis.request_checks import MESSAGES, Refusal, RequestFields

RETENTION: ContextVar[float] = ContextVar("headrace_retention", default=0.0)
"""Seconds for which the KV of the request that this task answers is retained; 0 for none."""

OPENAI_S = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86_400.0}
"""Seconds by OpenAI's values; its documents write the first one in both ways."""
ANTHROPIC_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds by Anthropic's `ttl`, 5m if it is left out."""
_DEFAULT_TTL = "5m"
_MARK = b'"cache_control"'


def reads_blocks(path: str, body: bytes) -> bool:
    """Return whether `requested_s` decodes a request's messages, another pass over a long body."""
    return path == MESSAGES and _MARK in body


def requested_s(path: str, fields: RequestFields) -> float | Refusal:
    """Return the seconds that a request for one of `request_checks.PATHS` asks for, 0 if it does
    not ask; or why it is refused."""
    return _anthropic(fields) if path == MESSAGES else _openai(fields.prompt_cache_retention)


def _openai(value: Any) -> float | Refusal:
    if value is None:
        return 0.0
    seconds = OPENAI_S.get(value) if isinstance(value, str) else None
    if seconds is None:
        name = "prompt_cache_retention"
        return Refusal(f"{name} is {_short(value)}. Possible are 'in_memory' and '24h'.", name)
    return seconds


def _anthropic(fields: RequestFields) -> float | Refusal:
    longest_s = 0.0
    for place, mark in _marks(fields):
        if mark is None:
            continue
        wrong, possible = "", ""
        if not isinstance(mark, dict):
            wrong, possible = f"{place} is {_short(mark)}", "{type: ephemeral, ttl: 5m or 1h}"
        elif mark.get("type") != "ephemeral":
            wrong, possible = f"{place}.type is {_short(mark.get('type'))}", "'ephemeral'"
        else:
            ttl = _DEFAULT_TTL if mark.get("ttl") is None else mark["ttl"]
            seconds = ANTHROPIC_S.get(ttl) if isinstance(ttl, str) else None
            if seconds is None:
                wrong, possible = f"{place}.ttl is {_short(ttl)}", "'5m' and '1h'"
            longest_s = max(longest_s, seconds or 0.0)
        if wrong:
            return Refusal(f"{wrong}. Possible: {possible}.", place.partition(".")[0])
    return longest_s


def _marks(fields: RequestFields) -> Iterator[tuple[str, Any]]:
    """Yield the values of `cache_control` with their places, as Anthropic's errors name them."""
    if bytes(fields.cache_control) != b"null":
        yield "cache_control", _decoded(fields.cache_control)
    for name in ("system", "tools"):
        yield from _marks_of(name, _blocks(getattr(fields, name)))
    for number, message in enumerate(_blocks(fields.messages)):
        if isinstance(message, dict):
            yield from _marks_of(f"messages.{number}.content", message.get("content"))


def _marks_of(place: str, blocks: Any, is_inner: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the marks of content blocks or tools, and of the blocks in tools' results."""
    for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
        if isinstance(block, dict):
            yield f"{place}.{number}.cache_control", block.get("cache_control")
            if not is_inner:
                inner = f"{place}.{number}.content"
                yield from _marks_of(inner, block.get("content"), is_inner=True)


def _blocks(raw: msgspec.Raw) -> Any:
    """Return a field that may have marks; an empty list if it has none."""
    return _decoded(raw) if _MARK in bytes(raw) else []


def _decoded(raw: msgspec.Raw) -> Any:
    """Return a field's value; an empty list if it is too deep, which vLLM reports."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return []


def _short(value: Any) -> str:
    return repr(value)[:100]
