"""Renders a client's prompt with vLLM's own endpoint handlers, and hashes its blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from headrace_decode.http.internal_port import ASGIApp
from headrace_decode.rendering.keys import (
    RENDER_ONLY,
    BlockKeysRoute,
    FindAvailableRuns,
    PromptRendered,
    RenderedPrompt,
)
from headrace_engine.vllm.kv_cache import block_hasher
from headrace_engine.vllm.openai_app import find_handler, request_model

FindAdapter = Callable[[str], Awaitable[Any]]


def keys_route(
    behind: ASGIApp,
    app: Any,
    vllm_config: Any,
    available_runs: FindAvailableRuns | None = None,
    machine: str = "",
    find_adapter: FindAdapter | None = None,
) -> BlockKeysRoute:
    """Return an application that answers with a prompt's block keys, in front of `behind`.

    Args:
        behind: the application for all other requests.
        app: vLLM's application over the engine; its handlers render the prompts.
        vllm_config: the engine's configuration.
        available_runs, machine: arguments of `BlockKeysRoute`.
        find_adapter: registers the adapter that a request names; None without adapters.
    """
    hasher = block_hasher(vllm_config)
    render = partial(rendered, app.state, find_adapter=find_adapter)
    return BlockKeysRoute(behind, render, hasher, available_runs, machine)


async def rendered(
    state: Any, target: str, body: dict[str, Any], find_adapter: FindAdapter | None = None
) -> RenderedPrompt | None:
    """Return the prompt of a client's request as the engine would get it.

    Return None if the endpoint's handler does not call the engine, or is not one of vLLM's.

    Args:
        state: the state of vLLM's application.
        target: the endpoint.
        body: the client's body.
        find_adapter: argument of `keys_route`.

    Raises:
        Exception: vLLM's error for a body that it refuses.
    """
    handler = find_handler(state, target)
    if handler is None:
        return None
    if find_adapter is not None and isinstance(body.get("model"), str):
        await find_adapter(body["model"])
    whole = {field: v for field, v in body.items() if field not in ("stream", "stream_options")}
    before = RENDER_ONLY.set(True)
    try:
        await handler(request_model(target).model_validate(whole))
    except PromptRendered as found:
        return found.prompt
    finally:
        RENDER_ONLY.reset(before)
    return None
