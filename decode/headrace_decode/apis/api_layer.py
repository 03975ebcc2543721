"""Adds the API layer to vLLM's application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace_decode.apis.middleware import ApiMiddleware
from headrace_decode.apis.request_checks import EngineAbilities
from headrace_engine.serving.validation import bound_validation
from headrace_engine.usage.usage_book import UsageBook
from headrace_engine.vllm.openai_app import (
    add_middleware,
    has_tool_server,
    has_watermark,
    uses_priorities,
)


def add_api_layer(
    app: Any,
    why_no_tools: str | None = None,
    engine_died: Callable[[], bool] = lambda: False,
    book: UsageBook | None = None,
) -> None:
    """Make an application check requests and complete answers; it must serve no request yet.

    Args:
        app: vLLM's application over an engine.
        why_no_tools: why tool calls cannot be parsed; None if they can.
        engine_died: returns whether the engine died.
        book: has what each request cost; None without it.
    """
    bound_validation(app)
    abilities = EngineAbilities(
        why_no_tools=why_no_tools,
        tool_server=has_tool_server(app),
        priorities=uses_priorities(app),
        watermarks=has_watermark(app),
    )
    add_middleware(app, ApiMiddleware, abilities=abilities, engine_died=engine_died, book=book)
