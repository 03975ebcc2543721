"""Returns the keys of a prompt's KV blocks to a gateway, before the gateway chooses a replica.

A gateway that chooses among several replicas needs to know how much of a prompt each of them holds.
Only vLLM knows the prompt's tokens: it validates the body, fills in the chat template and
tokenises. This route therefore hands the client's body to vLLM's own handler of the endpoint, which
processes it as it will process the request itself. Where the handler would start the engine, the
engine raises `PromptRendered` with the prompt. Nothing is computed, and no request is counted.
Errors in the body are not reported here: the request itself reports them.

Prompts with media (images, sound) are not rendered, since the media would be fetched twice.

The route is part of the replica's own port and not of its application, so no client reaches it:

    POST /headrace/internal/keys  {"target": "/v1/chat/completions", "body": {...}}
    {"prompt_tokens": 300, "keys": base64 of u64 little-endian [blocks],
     "local_only": null or why only a decode replica can prefill it,
     "machine": Ray's id of this node, "stored": [[medium, tokens, seconds to wait], ...]}
    {"keys": null, "why": "..."}
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from headrace_decode.http.internal_port import KEYS_TARGET, ASGIApp
from headrace_kvstore.identity.prompt_hash import keys_of
from headrace_kvstore.lookup.availability import AvailableRun

logger = logging.getLogger("headrace.decode")

RENDER_ONLY: ContextVar[bool] = ContextVar("headrace_render_only", default=False)
"""Whether this task only renders a prompt and does not compute it."""

FindAvailableRuns = Callable[[Sequence[int], str], Awaitable[Sequence[AvailableRun]]]

_TEXT = frozenset(
    [
        *("text", "input_text", "output_text", "refusal", "thinking", "redacted_thinking"),
        *("tool_use", "tool_result", "reasoning_text", "summary_text"),
    ]
)
"""Types of a message's parts for which nothing must be fetched or decoded."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """One prompt as the engine would get it.

    Attributes:
        token_ids: [tokens].
        salt: its cache salt, with the tenant.
        local_only: why the engine that answers must prefill the prompt itself, or None.
        plain: whether the prompt's blocks are hashed from tokens, salt and adapter alone.
        lora: name and path of its LoRA adapter; None without one.
        adapter: digest of the adapter's content; empty without one.
    """

    token_ids: Sequence[int]
    salt: str
    local_only: str | None = None
    plain: bool = True
    lora: tuple[str, str] | None = None
    adapter: str = ""


class PromptRendered(Exception):
    """Exception that is raised instead of computing a prompt if `RENDER_ONLY` is set."""

    def __init__(self, prompt: RenderedPrompt) -> None:
        super().__init__("the prompt was rendered only")
        self.prompt = prompt


class BlockKeysRoute:
    """ASGI application that answers `KEYS_TARGET`, and passes on all other requests.

    Args:
        app: the application for all other requests.
        render: (target, body) -> the prompt of a client's request; None if there is not one.
        hashes: (token ids, salt, name and path of the adapter) -> the engine's hashes of the
            prompt's full blocks.
        available_runs: (token ids, salt) -> the tokens that this machine's store could supply.
        machine: the machine's id.
    """

    def __init__(
        self,
        app: ASGIApp,
        render: Callable[[str, dict[str, Any]], Awaitable[RenderedPrompt | None]],
        hashes: Callable[[Sequence[int], str, tuple[str, str] | None], list[bytes]],
        available_runs: FindAvailableRuns | None = None,
        machine: str = "",
    ) -> None:
        self._app, self._render, self._hashes = app, render, hashes
        self._available_runs, self._machine = available_runs, machine
        self._logged: set[type] = set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer one request; stop when the caller leaves."""
        if scope["type"] != "http" or scope["path"] != KEYS_TARGET:
            await self._app(scope, receive, send)
            return
        data = await _body(receive)
        if data is None:
            return
        work = asyncio.ensure_future(self.answer(data))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                answer = json.dumps(work.result(), separators=(",", ":")).encode()
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": answer})
        finally:
            work.cancel()
            left.cancel()

    async def answer(self, data: bytes) -> dict[str, Any]:
        """Return the answer to a body of this route. Never raises."""
        try:
            asked = json.loads(data)
            target, body = asked["target"], asked["body"]
            why = why_not_rendered(body)
            if why is not None:
                return {"keys": None, "why": why}
            prompt = await self._render(target, body)
            if prompt is None or not prompt.token_ids:
                return {"keys": None, "why": "there is no prompt of tokens"}
            return await self._keys_answer(prompt)
        except Exception as error:
            # Usually the client's error, which the request itself will report.
            level = logging.DEBUG if type(error) in self._logged else logging.INFO
            self._logged.add(type(error))
            logger.log(level, "a prompt was not rendered for a gateway: %r", error)
            return {"keys": None, "why": type(error).__name__}

    async def _keys_answer(self, prompt: RenderedPrompt) -> dict[str, Any]:
        named = (prompt.token_ids, prompt.salt)
        hashes = self._hashes(*named, prompt.lora) if prompt.plain else []
        stored: Sequence[AvailableRun] = ()
        is_stored = prompt.plain and prompt.lora is None and prompt.local_only is None
        if self._available_runs is not None and is_stored:
            stored = await self._available_runs(*named)
        return {
            "prompt_tokens": len(prompt.token_ids),
            "keys": base64.b64encode(keys_of(hashes).astype("<u8").tobytes()).decode(),
            "local_only": prompt.local_only,
            "machine": self._machine,
            "stored": [list(run) for run in stored],
            **({"adapter": prompt.adapter} if prompt.adapter else {}),
        }


def why_not_rendered(body: dict[str, Any]) -> str | None:
    """Return why a request is not rendered in advance, or None if it may be."""
    prompts = body.get("prompt")
    if isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int):
        return "there are several prompts"
    if body.get("use_beam_search"):
        return "a beam search has many prompts"
    if body.get("prompt_embeds") is not None:
        return "the prompt is not tokens"
    if _has_media(body.get("messages")) or _has_media(body.get("input")):
        return "the prompt holds more than text"
    return None


def _has_media(messages: Any) -> bool:
    """Return whether parts of messages, or of tools' answers in them, are not plain text."""
    left = list(messages) if isinstance(messages, list) else []
    while left:
        message = left.pop()
        for field in ("content", "output") if isinstance(message, dict) else ():
            parts = message.get(field)
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict):
                    # With a `uuid`, vLLM treats a part of any type as media.
                    if part.get("type") not in _TEXT or "uuid" in part:
                        return True
                    left.append(part)
    return False


async def _body(receive: Any) -> bytes | None:
    """Return the whole body; None if the caller left before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
