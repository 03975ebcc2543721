"""Renders a client's prompt with vLLM's own endpoint handlers, and hashes its blocks.

`tests/unit/test_contracts.py` checks the parts of vLLM that are used here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.config import VllmConfig

from headrace_decode.internal import ASGIApp
from headrace_decode.rendering.keys import RENDER_ONLY, KeysRoute, Prompt, Rendered, Supplies
from headrace_engine.vllm.kv_cache import BlockHasher

HANDLERS = {
    "/v1/chat/completions": ("openai_serving_chat", "create_chat_completion"),
    "/v1/completions": ("openai_serving_completion", "create_completion"),
    "/v1/responses": ("openai_serving_responses", "create_responses"),
    "/v1/messages": ("anthropic_serving_messages", "create_messages"),
}
"""Endpoints whose prompts can be rendered without an answer: attribute of the application's state,
and its method, which takes the request's body and needs no HTTP request."""


def application_without_engine() -> Any:
    """Build vLLM's own FastAPI application for a text model: routes and schemas, no engine."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    return build_app(args, supported_tasks=("generate",))


def keys_route(
    behind: ASGIApp,
    app: Any,
    vllm_config: VllmConfig,
    supplies: Supplies | None = None,
    machine: str = "",
) -> KeysRoute:
    """Return an application that answers with a prompt's block keys, in front of `behind`.

    Args:
        behind: the application for all other requests.
        app: vLLM's application over the engine; its handlers render the prompts.
        vllm_config: the engine's configuration.
        supplies, machine: arguments of `KeysRoute`.
    """
    hasher = block_hasher(vllm_config)
    return KeysRoute(behind, partial(rendered, app.state), hasher, supplies, machine)


def block_hasher(vllm_config: VllmConfig) -> BlockHasher:
    """Return a function: (token ids, salt) -> the engine's hashes of a prompt's full blocks."""
    cache = vllm_config.cache_config
    return BlockHasher(cache.prefix_caching_hash_algo, cache.block_size)


async def rendered(state: Any, target: str, body: dict[str, Any]) -> Prompt | None:
    """Return the prompt of a client's request as the engine would get it.

    Return None if the endpoint's handler does not call the engine, or is not in `HANDLERS`.

    Args:
        state: the state of vLLM's application.
        target: the endpoint.
        body: the client's body.

    Raises:
        Exception: vLLM's error for a body that it refuses.
    """
    name, method = HANDLERS.get(target, ("", ""))
    handler = getattr(state, name, None) if name else None
    if handler is None:
        return None
    whole = {field: v for field, v in body.items() if field not in ("stream", "stream_options")}
    before = RENDER_ONLY.set(True)
    try:
        await getattr(handler, method)(request_form(target).model_validate(whole))
    except Rendered as found:
        return found.prompt
    finally:
        RENDER_ONLY.reset(before)
    return None


def request_form(target: str) -> Any:
    """Return vLLM's model of an endpoint's body.

    Raises:
        KeyError: the endpoint is not in `HANDLERS`.
    """
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/v1/messages": AnthropicMessagesRequest,
    }[target]
