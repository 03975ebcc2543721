"""vLLM's own OpenAI application: built without an engine, extended, and asked for its handlers.

`tests/unit/test_contracts.py` and `test_contracts_decode.py` pin what is used here.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

HANDLERS = {
    "/v1/chat/completions": ("openai_serving_chat", "create_chat_completion"),
    "/v1/completions": ("openai_serving_completion", "create_completion"),
    "/v1/responses": ("openai_serving_responses", "create_responses"),
    "/v1/messages": ("anthropic_serving_messages", "create_messages"),
}
"""Endpoints whose handlers take the request's body and need no HTTP request: attribute of the
application's state, and its method."""


def application_without_engine() -> Any:
    """Build vLLM's own FastAPI application for a text model: routes and schemas, no engine."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["--enable-scale-out"])
    return build_app(args, supported_tasks=("generate",))


def add_middleware(app: Any, middleware: Any, **settings: Any) -> None:
    """Add a middleware like `app.add_middleware`, after the stack was built.

    `app.add_middleware` itself refuses, since vLLM's `build_app` has built the stack of middleware
    although no request was served.
    """
    app.user_middleware.insert(0, Middleware(middleware, **settings))
    app.middleware_stack = app.build_middleware_stack()


def has_tool_server(app: Any) -> bool:
    """Return whether an application has a server of built-in tools."""
    return bool(app.state.args.tool_server)


def uses_priorities(app: Any) -> bool:
    """Return whether the engine of an application schedules by priority."""
    return bool(app.state.vllm_config.scheduler_config.policy == "priority")


def has_watermark(app: Any) -> bool:
    """Return whether the engine of an application marks the texts that it writes."""
    return app.state.vllm_config.watermark_config is not None


def serving_models(app: Any) -> Any:
    """Return the `OpenAIServingModels` of vLLM's application."""
    return app.state.openai_serving_models


def find_handler(state: Any, target: str) -> Any:
    """Return an endpoint's handler, which takes the endpoint's body; None if there is none.

    Args:
        state: the state of vLLM's application.
    """
    name, method = HANDLERS.get(target, ("", ""))
    handler = getattr(state, name, None) if name else None
    return None if handler is None else getattr(handler, method)


def request_model(target: str) -> Any:
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
