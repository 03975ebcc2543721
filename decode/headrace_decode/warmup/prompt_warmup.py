"""Computes the KV of prompts before a client needs it: system prompts at start, and on demand.

A prompt goes through the replica's own HTTP application like a client's request, so it is rendered,
tokenised and planned like the real requests that follow. One token of its answer is computed and
discarded. The prompt's full blocks are then in the store, where they can be pinned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from headrace_decode.http.internal_port import TENANT
from headrace_kvstore.identity.salts import split_salt

logger = logging.getLogger("headrace.decode")

SAVE_PATIENCE_S = 10.0
"""Maximum time to wait for a prompt's blocks, which are saved in the background after the step."""

Stored = Callable[[Sequence[int], str], int]
"""(token ids, salt) -> number of leading tokens of the prompt that the store holds."""


async def warm_prompts(
    app: Any,
    model_id: str,
    bodies: Sequence[dict[str, Any]],
    salt: str,
    stored: Stored,
    block_tokens: int,
) -> list[dict[str, Any]]:
    """Compute and store the KV of prompts, one after the other.

    Args:
        app: the replica's OpenAI application (ASGI).
        bodies: each `{"prompt": text or token ids}` or `{"messages": [...]}`.
        salt: the tenant's cache salt; empty for none.
        stored: returns how much of a prompt the store holds.
        block_tokens: tokens of a KV block.

    Returns:
        For each prompt its `token_ids`, `cached_tokens` (found in a cache) and `stored_tokens`; or
        `error` with vLLM's message.
    """
    transport = httpx.ASGITransport(app=app)
    common: dict[str, Any] = {"model": model_id, "max_tokens": 1, "return_token_ids": True}
    tenant, own = split_salt(salt)
    TENANT.set(tenant)  # of this task; vLLM checks the client's own salt only
    if own:
        common["cache_salt"] = own
    done: list[dict[str, Any]] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
        for body in bodies:
            path = "/v1/completions"
            if "messages" in body:
                # The next message of the conversation is not known yet.
                path, body = "/v1/chat/completions", {**body, "add_generation_prompt": False}
            response = await client.post(path, json={**common, **body}, timeout=None)
            done.append(_outcome(response))
            if "error" not in done[-1]:
                ids = done[-1]["token_ids"]
                wanted = len(ids) // block_tokens * block_tokens
                until = time.monotonic() + SAVE_PATIENCE_S
                while stored(ids, salt) < wanted and time.monotonic() < until:
                    await asyncio.sleep(0.05)
                done[-1]["stored_tokens"] = stored(ids, salt)
    return done


def _outcome(response: httpx.Response) -> dict[str, Any]:
    answer = response.json()
    if response.is_error:
        return {"error": answer.get("error", {}).get("message", response.text[:200])}
    token_ids = answer.get("prompt_token_ids") or answer["choices"][0].get("prompt_token_ids") or []
    details = answer["usage"].get("prompt_tokens_details") or {}
    return {"token_ids": token_ids, "cached_tokens": details.get("cached_tokens") or 0}
